"""Model cards: what a model file says about itself, in Markdown for people."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from personafl.core import wire
from personafl.core.net import Net
from personafl.core.reading import AS_FOUND
from personafl.core.split import listed
from personafl.core.tasks import task_named
from personafl.models.modelfile import Card, Part, bits_of, network_text
from personafl.models.network import Network, SharedNetwork
from personafl.recipe.recipe import Recipe
from personafl.simulate.trainer import Learners


class Origin(NamedTuple):
    """What made a model: the recipe, the clients, the name of the method, and the network that all share."""

    recipe: Recipe
    learners: Learners
    method: str
    network: SharedNetwork

    def net(self, client: int | None) -> Net:
        """Return the network of a client's own model; None: the shared one."""
        who = self.learners
        return who.problems[0].net if client is None else who.problems[int(who.problem_of[client])].personal_net


def facts_of(
    origin: Origin,
    client: int | None,
    parts: tuple[Part, ...],
    *,
    run: str,
    model: str,
    whose: str | None,
    accuracies: dict[str, float],
) -> dict[str, str]:
    """Return what a `Card` has of a client's model, as text; client None: of what all share."""
    data, net, dtype = origin.learners.data, origin.net(client), origin.learners.dtype
    shape = data.shape

    def dense(kind: torch.dtype) -> int:
        like = {name: torch.empty(shape, dtype=kind, device="meta") for name, shape in net.shapes.items()}
        return wire.size((like,))

    facts = {
        "run": run,
        "method": origin.method,
        "network": network_text(_network(origin, client)),
        "head": net.head,
        "dtype": str(dtype).removeprefix("torch."),
        "task": shape.task,
        "input_shape": json.dumps(shape.input_shape),
        "target_shape": json.dumps(shape.target_shape),
        "classes": shape.classes,
        "vocabulary": shape.vocabulary,
        "reading": None if data.reading == AS_FOUND else data.reading.model_dump_json(exclude_defaults=True),
        "moments": None if data.moments is None else data.moments.model_dump_json(),
        "scale": None if data.scale is None else data.scale.model_dump_json(),
        "model": model,
        "client": whose,
        "parameters": wire.parameters(parts),
        "parameters_dense": net.parameters,
        "bytes_packed": wire.size(parts),
        "bytes_dense": dense(dtype),
        "bytes_fp32": dense(torch.float32),
        "bits": bits_of(parts),
        "test_accuracy": accuracies.get(model),
        "accuracies": json.dumps(accuracies),
    }
    return {key: str(value) for key, value in facts.items() if value is not None}


def _network(origin: Origin, client: int | None) -> Network:
    who = origin.learners
    if client is None or (own := origin.net(client)) is origin.net(None) or own.head is not None:
        return origin.network
    record = origin.recipe.devices[int(who.problem_of[client])].model
    assert record is not None
    return record.resolved(who.data)


_NAMES = {
    "global": "global model",
    "personal": "personal model",
    "tuned": "fine-tuned personal model",
    "blend": "blend of the global and the personal model",
}
_LOCAL = {"local": "trained on the client's data alone"}


def model_card(card: Card, file: Path) -> str:
    """Return the card of the model in a file, and in the ONNX file beside it if there is one."""
    whose = "" if card.client is None else f" of client {_plain(card.client)}"
    onnx = file.with_suffix(".onnx")
    files = [file, onnx] if onnx.exists() else [file]
    blocks = [f"# {_NAMES[card.model].capitalize()}{whose}", _table(_facts(card, files)), *_accuracy(card)]
    return "\n\n".join([*blocks, *_use(card, files)]) + "\n"


def _facts(card: Card, files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    yield "", ""
    yield "Method", _plain(card.method)
    yield "Network", _plain(card.network.name or "the user's own")
    yield "Task", f"{card.task}, {card.classes} {card.counted}"
    if card.reading.classes is not None:
        yield "Classes", _plain(listed(card.reading.classes))
    if card.reading.features is not None:
        yield "Columns", _plain(listed(card.reading.features))
    yield "Input", _input(card, card.dtype) + ("" if card.moments is None else ", which the model standardises itself")
    fewer = f" of {card.parameters_dense:,}" if card.parameters < card.parameters_dense else ""
    yield "Parameters", f"{card.parameters:,}{fewer}"
    yield "Weights", card.dtype if card.bits is None else f"{card.bits}-bit in quantized layers, else {card.dtype}"
    if card.epsilon is not None:
        own = "" if card.model == "global" else "; what is the client's own is for it alone"
        shared = f"ε = {card.epsilon:.3g}, δ = {card.delta:g} of clients, by what is shared"
        yield "Privacy", f"{shared}{own}" + (f"; {card.assumption}" if card.assumption else "")
    if card.sample_epsilon is not None:
        kept = card.model != "global" and card.sample_covers == "sent"
        of = "by what clients send; this model itself is not covered" if kept else "each of its client's data"
        yield "Privacy of samples", f"ε = {card.sample_epsilon:.3g}, δ = {card.sample_delta:g} of samples, {of}"
    whole = card.bytes_fp32 or card.bytes_dense
    for file in files:
        size = file.stat().st_size
        yield f"`{file.name}`", f"{_kb(size)} = {100 * size / whole:.1f} % of FP32 ({_kb(whole)})"


def _accuracy(card: Card) -> Iterator[str]:
    if not card.accuracies:
        return
    score = {"r2": "R²", "f1": "F1"}.get(task_named(card.task).score, "Accuracy")
    yield f"## {score}"
    yield "Means over clients that took part, on their test data." if card.client is None else "On its test data."
    rows = [("Model", score)]
    for key, name in (_NAMES | _LOCAL).items():
        if key in card.accuracies:
            this = f"**{name} (this one)**" if key == card.model else name
            rows.append((this, f"{100 * card.accuracies[key]:.1f} %"))
    yield _table(rows)


def _use(card: Card, files: list[Path]) -> Iterator[str]:
    own = "" if card.network.name else ", module=…"
    yield "## Use"
    yield _code(
        "import personafl",
        f'network = personafl.load_model("{files[0].name}"{own})',
        f"scores = network(x)  # x: {_input(card, card.dtype)}",
    )
    if card.task == "next-token" and card.reading.tokenizer is not None:
        yield "How it continues a text, with the tokenizer that its data were read with:"
        yield _code(f'print(personafl.generate("{files[0].name}", "…"))')
    for file in files[1:]:
        yield "On a device, with numpy and onnxruntime alone:"
        yield _code(
            "import onnxruntime",
            f'session = onnxruntime.InferenceSession("{file.name}")',
            f'[scores] = session.run(["scores"], {{"x": x}})  # x: {_input(card, "float32")}',
        )


def _input(card: Card, dtype: str) -> str:
    shape = ", ".join(map(str, ("batch", *card.input_shape)))
    return f"{dtype} [{shape}]" if card.vocabulary is None else f"int64 [{shape}], tokens below {card.vocabulary}"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table, the first row of which is its head."""
    head, *others = (f"| {left} | {right} |" for left, right in rows)
    return "\n".join([head, "|---|---|", *others])


def _code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _kb(size: int) -> str:
    return f"{size / 1e3:,.1f} kB"


def _plain(text: str) -> str:
    """Return text that Markdown takes as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(text.split()))
