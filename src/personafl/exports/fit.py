"""Which network of its own fits on a device: candidates of all sizes and bits, and the largest one within the limits.

Nothing is trained. Sizes are exact: what a client's model takes in its packed form, header included, as results have it
in `bytes_stored`. Memory is that of training, as `exports.memory` measures it.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError

from personafl.core import rng, wire
from personafl.core.algorithm import Algorithm, Problem, packed
from personafl.core.net import Net
from personafl.core.wire import Quantized
from personafl.errors import BadInput
from personafl.exports.memory import round_memory
from personafl.models import MODELS, make_net
from personafl.models.network import Network
from personafl.options import explain
from personafl.recipe.method import MethodSection
from personafl.recipe.recipe import Recipe
from personafl.recipe.values import apply_overrides
from personafl.runs.abilities import methods_that
from personafl.runs.build import prepare
from personafl.simulate.federation import Federation

BITS: tuple[int | None, ...] = (None, 8, 4, 3, 2, 1)  # None: full precision
_LEAST = 2  # bits of a choice, unless the user names them: 1 bit costs accuracy
_DIVIDED = ("additive", "split_input")  # made for methods that share one part of a network and keep the other
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a device has: bytes for its model, and bytes of memory to train in (None: enough)."""

    bytes: int
    memory: int | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A network with so many bits per weight (None: full precision), and what it takes."""

    network: Network
    bits: int | None
    parameters: int
    bytes: int
    memory: int | None = None  # None: not measured

    @property
    def label(self) -> str:
        """The network as `parse_models` reads it."""
        options = [f"{key}={_inline(value)}" for key, value in _values(self.network).items() if key != "name"]
        return self.network.name + (f":{','.join(options)}" if options else "")

    @property
    def device(self) -> dict[str, Any]:
        """The recipe's `devices` entry that gives it to all clients."""
        bits = {} if self.bits is None else {"bits": self.bits}
        return {"share": 1.0, "model": _values(self.network), **bits}

    def fits(self, limits: Limits) -> bool:
        """Say whether it is within the limits."""
        return self.bytes <= limits.bytes and (limits.memory is None or (self.memory or 0) <= limits.memory)

    def to_toml(self) -> str:
        """Return its entry for a recipe."""
        return "\n".join(["[[devices]]", *(f"{key} = {_inline(value)}" for key, value in self.device.items())])


@dataclass(frozen=True, kw_only=True)
class Fit:
    """All candidates, the largest first, and the one to take."""

    limits: Limits
    method: str  # that packs and trains them
    candidates: tuple[Candidate, ...]
    chosen: Candidate

    def to_json(self) -> dict[str, Any]:
        """Return it as `personafl fit --json` prints it."""
        entries = [
            {
                "model": _values(one.network),
                "bits": one.bits,
                "parameters": one.parameters,
                "bytes": one.bytes,
                "memory": one.memory,
                "fits": one.fits(self.limits),
                "chosen": one is self.chosen,
            }
            for one in self.candidates
        ]
        limits = {"max_bytes": self.limits.bytes, "max_memory": self.limits.memory}
        return {**limits, "method": self.method, "device": self.chosen.device, "candidates": entries}


def fit(
    recipe: Recipe, limits: Limits, models: Sequence[Network] | None = None, bits: Sequence[int | None] | None = None
) -> Fit:
    """Return the networks that could be a client's own, and the largest that is within the limits.

    Without `models` these are all named ones that suit the data, and the recipe's. Models are packed and trained as the
    recipe's method does, if it takes networks of the clients' own and bits, else as its comparison runs the first of
    ours that does (quped).
    """
    recipe = _with_bits(recipe)
    federation = prepare(recipe).federation
    shared = federation.problems[0]
    found: list[Candidate] = []
    for network, net in _networks(recipe, federation, models):
        net.to(federation.data.device, federation.dtype)
        try:
            own = _quantized(federation, dataclasses.replace(shared, local_net=net, bits=1))
        except BadInput as error:  # it has no layer to quantize
            own = frozenset()
            if models is not None and None not in (bits or BITS):
                raise BadInput(f"--models {network.name}: {error}") from error
        for width in bits or BITS:
            if own or width is None:
                candidate = Candidate(
                    network=network, bits=width, parameters=net.parameters, bytes=_bytes(federation, net, own, width)
                )
                found.append(_measured(candidate, limits, federation, net))
    order = sorted(found, key=_rank, reverse=True)
    return Fit(
        limits=limits,
        method=federation.algorithm.name,
        candidates=tuple(order),
        chosen=choose(order, limits, _LEAST if bits is None else 1),
    )


def choose(candidates: Sequence[Candidate], limits: Limits, least_bits: int = _LEAST) -> Candidate:
    """Return the one with most parameters that is within the limits in `least_bits` or more; of its bits the most."""
    if not candidates:
        raise BadInput("--bits: no model for this data can be quantized; add full to them, or name deeper --models")
    if not (small := [one for one in candidates if one.bytes <= limits.bytes]):
        least = min(candidates, key=lambda one: one.bytes)
        raise BadInput(
            f"--max-bytes {limits.bytes}: no model fits; the smallest is {_said(least)} with {least.bytes:,} bytes; "
            "raise it, or name smaller models: --models mlp:hidden=[8]"
        )
    if not (fitting := [one for one in small if one.fits(limits)]):
        least = min(small, key=lambda one: one.memory or 0)
        raise BadInput(
            f"--max-memory {limits.memory}: no model can be trained in it; {_said(least)} needs least, "
            f"{least.memory:,} bytes; raise it, lower training.batch, or name smaller models: --models mlp:hidden=[8]"
        )
    if not (good := [one for one in fitting if (one.bits or math.inf) >= least_bits]):
        best = max(fitting, key=_rank)
        raise BadInput(
            f"--max-bytes {limits.bytes}: only with 1 bit a model fits, {_said(best)} with {best.bytes:,} bytes, and 1 "
            "bit costs accuracy; raise it, or allow that: --bits 1"
        )
    return max(good, key=_rank)


def parse_size(text: str, where: str) -> int:
    """Read a number of bytes: 100k, 1.5M and 2G are powers of 1000, 64Ki, 1Mi and 1Gi of 1024; B may follow."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]i?|)b?", text.strip(), re.IGNORECASE)
    size = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size < 1:
        raise BadInput(f"{where}: {text!r} is no size; write it as 100k, 1.5M, 64Ki, or in bytes")
    return size


def parse_models(text: str) -> list[Network]:
    """Read networks with their options, for example `cnn1,mlp:hidden=[16],dropout=0.1,lenet`."""
    entries: list[tuple[str, list[str]]] = []
    for item in re.split(r",(?![^\[]*\])", text):  # commas in [ ] are a value's
        head, equals, _ = item.strip().partition("=")
        name, colon, _ = head.rpartition(":")
        if not equals:
            entries.append((head, []))
        elif colon:
            entries.append((name, [item.strip().removeprefix(f"{name}:")]))
        elif entries:
            entries[-1][1].append(item.strip())
        if not entries or not entries[-1][0]:
            raise BadInput(f"--models {text!r}: write NAME or NAME:KEY=VALUE, with commas between")
    networks: list[Network] = []
    for name, options in entries:
        try:
            network = Network.model_validate({**apply_overrides({}, options), "name": name})
        except ValidationError as error:
            raise explain(error, f"--models {name}", Network) from error
        if network in networks:
            raise BadInput(f"--models: {name!r} is there twice; remove one")
        networks.append(network)
    return networks


def parse_bits(text: str) -> list[int | None]:
    """Read numbers of bits, for example `full,8,2`."""
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if not re.fullmatch("full|[1-8]", word) or words.count(word) > 1]:
        raise BadInput(f"--bits {text!r}: {wrong[0]!r} is wrong; write numbers from 1 to 8 or full, each once")
    return [None if word == "full" else int(word) for word in words]


def _with_bits(recipe: Recipe) -> Recipe:
    """Return the recipe of a method that takes networks and bits, which come from the candidates alone."""
    algorithm = recipe.algorithm()
    if not _takes_both(algorithm):
        recipe = recipe.for_method(methods_that(_takes_both)[0], recipe.seed)
    options = {key: value for key, value in recipe.method.options.items() if key != "bits"}
    return recipe.model_copy(
        update={
            "method": MethodSection(name=recipe.method.name, **options),
            "devices": (),
            "start": None,
            "engine": recipe.engine.model_copy(update={"device": "cpu"}),
        }
    )


def _takes_both(algorithm: Algorithm) -> bool:
    return algorithm.own_networks and algorithm.uses_bits


def _networks(
    recipe: Recipe, federation: Federation, models: Sequence[Network] | None
) -> Iterator[tuple[Network, Net]]:
    """Yield the networks to look at that can be built for the data; one that was asked for must be."""
    data = federation.data
    known = [Network(name=name) for name in MODELS if name not in _DIVIDED]
    mine = recipe.model.whole.resolved(data)
    for network in models or (known if mine in known else [mine, *known]):
        resolved = network.resolved(data)
        try:
            yield resolved, make_net(resolved, data)
        except BadInput as error:
            if models is not None:
                raise BadInput(f"--models {resolved.name}: {error}") from error


def _quantized(federation: Federation, problem: Problem) -> frozenset[str]:
    """Return the weights that the method quantizes, by its own word."""
    rule, start = federation.algorithm, federation.start or {}
    down = rule.client.expects(problem, start)
    state = rule.client.init(problem, down, rng.generator(federation.seed, "fit"))
    parts = packed(rule.client, problem, down, state)["personal"]
    return frozenset(name for part in parts for name, leaf in part.items() if isinstance(leaf, Quantized))


def _bytes(federation: Federation, net: Net, quantized: frozenset[str], bits: int | None) -> int:
    """Return the size of the packed model; a weight whose codes and centers are no smaller than itself stays whole."""

    def empty(*shape: int, dtype: torch.dtype = federation.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=_META)

    model: dict[str, Any] = {name: empty(*shape) for name, shape in net.shapes.items()}
    if bits is not None:
        for name in quantized:
            shape = net.shapes[name]
            codes = empty(math.ceil(shape.numel() * bits / 8), dtype=torch.uint8)
            form = Quantized(codes, empty(2**bits), empty(len(shape), dtype=torch.int32))
            if wire.size(({name: form},)) < wire.size(({name: model[name]},)):
                model[name] = form
    return wire.size((model,))


def _measured(candidate: Candidate, limits: Limits, federation: Federation, net: Net) -> Candidate:
    """Return it with the memory that its training needs on the client with most samples, if that is in question."""
    if limits.memory is None or candidate.bytes > limits.bytes:
        return candidate
    data = federation.data
    problem = dataclasses.replace(federation.problems[0], local_net=net, bits=candidate.bits)
    largest = data.seen[data.train.sizes[data.seen].argmax()]
    return dataclasses.replace(candidate, memory=round_memory(federation, problem, int(largest)))


def _rank(candidate: Candidate) -> tuple[int, float]:
    return candidate.parameters, candidate.bits or math.inf


def _said(candidate: Candidate) -> str:
    bits = "full precision" if candidate.bits is None else f"{candidate.bits} bit{'s' if candidate.bits > 1 else ''}"
    return f"{candidate.label} in {bits}"


def _values(network: Network) -> dict[str, Any]:
    """Return a network as a recipe writes it, without defaults."""
    return {"name": network.name, **network.model_dump(mode="json", exclude_defaults=True)}


def _inline(value: Any) -> str:
    """Write a value as TOML in one line."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_inline(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    return json.dumps(value, ensure_ascii=False)
