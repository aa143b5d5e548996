"""Model cards: what a model file says about itself, in Markdown for people."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from personafl.models.modelfile import Card

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
    yield "Task", f"{card.task}, {card.classes} classes"
    yield "Input", _input(card, card.dtype)
    fewer = f" of {card.parameters_dense:,}" if card.parameters < card.parameters_dense else ""
    yield "Parameters", f"{card.parameters:,}{fewer}"
    yield "Weights", card.dtype if card.bits is None else f"{card.bits}-bit in quantized layers, else {card.dtype}"
    whole = card.bytes_fp32 or card.bytes_dense
    for file in files:
        size = file.stat().st_size
        yield f"`{file.name}`", f"{_kb(size)} = {100 * size / whole:.1f} % of FP32 ({_kb(whole)})"


def _accuracy(card: Card) -> Iterator[str]:
    if not card.accuracies:
        return
    yield "## Accuracy"
    yield "Means over clients that took part, on their test data." if card.client is None else "On its test data."
    rows = [("Model", "Accuracy")]
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
