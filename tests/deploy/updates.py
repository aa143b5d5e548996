"""Malformed updates: named classes of them, each with the code that refuses it, and generated ones."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch

from personafl.core import wire
from personafl.deploy.net.messages import Code, Update

Named = dict[str, torch.Tensor]
Made = tuple[Update, bytes]


def saved(named: Named) -> bytes:
    return safetensors.torch.save({name: leaf.contiguous() for name, leaf in named.items()})


def first(named: Named) -> str:
    """The name of a weight that is a matrix."""
    return next(name for name, leaf in sorted(named.items()) if leaf.ndim == 2)


def _with(change: Callable[[Named, str], Any]) -> Callable[[Update, bytes], Made]:
    """Return a maker that changes the tensors of a good update in place."""

    def make(update: Update, payload: bytes) -> Made:
        named = {name: leaf.clone() for name, leaf in wire.decode_named(payload).items()}
        change(named, first(named))
        return update, saved(named)

    return make


def _header(change: Callable[[dict[str, Any]], Any], data: Callable[[bytes], bytes] = bytes) -> Any:
    """Return a maker that changes the header of the safetensors file, by hand."""

    def make(update: Update, payload: bytes) -> Made:
        (length,) = struct.unpack("<Q", payload[:8])
        header = json.loads(payload[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return update, struct.pack("<Q", len(text)) + text + data(payload[8 + length :])

    return make


def _said(**values: Any) -> Callable[[Update, bytes], Made]:
    return lambda update, payload: (update.model_copy(update=values), payload)


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Update, bytes], Made]:
    return lambda update, payload: (update, change(payload))


def _set(value: float) -> Callable[[Update, bytes], Made]:
    return _with(lambda named, name: named[name].view(-1)[0].fill_(value))


def _sparse(places: list[int], values: list[float], shape: list[int] | None, kind: torch.dtype = torch.int32) -> Any:
    def change(named: Named, name: str) -> None:
        like = named.pop(name)
        named[f"{name}#sparse.places"] = torch.tensor(places, dtype=torch.int32)
        named[f"{name}#sparse.values"] = torch.tensor(values)
        named[f"{name}#sparse.shape"] = torch.tensor(shape or list(like.shape), dtype=kind)

    return _with(change)


def _rename(named: Named, name: str, new: str) -> None:
    named[new] = named.pop(name)


CLASSES: dict[str, tuple[Code, Callable[[Update, bytes], Made]]] = {
    "an earlier round": (Code.ROUND_CLOSED, lambda update, payload: (update.model_copy(update={"round": 0}), payload)),
    "a later round": (Code.WRONG_ROUND, _said(round=9)),
    "another model": (Code.WRONG_MODEL, _said(model="f" * 64)),
    "more samples": (Code.BAD_SAMPLES, _said(samples=10**6)),
    "no samples": (Code.BAD_SAMPLES, _said(samples=0)),
    "nothing": (Code.BAD_NAMES, _bytes(lambda _: b"")),
    "random bytes": (Code.BAD_PAYLOAD, _bytes(lambda _: random.Random(0).randbytes(500))),
    "a pickle": (Code.BAD_PAYLOAD, _bytes(lambda _: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.")),
    "half of it": (Code.BAD_PAYLOAD, _bytes(lambda payload: payload[: len(payload) // 2])),
    "bytes at the end": (Code.BAD_PAYLOAD, _bytes(lambda payload: payload + b"more")),
    "a header that claims terabytes": (
        Code.BAD_PAYLOAD,
        _bytes(lambda payload: struct.pack("<Q", 2**40) + payload[8:]),
    ),
    "a header that is no JSON": (Code.BAD_PAYLOAD, _bytes(lambda payload: payload[:8] + b"!" + payload[9:])),
    "overlapping tensors": (
        Code.BAD_PAYLOAD,
        _header(lambda header: [entry.update(data_offsets=[0, 4]) for entry in header.values() if "dtype" in entry]),
    ),
    "a dtype that does not exist": (
        Code.BAD_PAYLOAD,
        _header(lambda header: [entry.update(dtype="F99") for entry in header.values() if "dtype" in entry]),
    ),
    "fifty thousand empty tensors": (
        Code.BAD_PAYLOAD,
        _header(
            lambda header: header.update(
                {f"change/{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(50_000)}
            )
        ),
    ),
    "a missing entry": (Code.BAD_NAMES, _with(lambda named, name: named.pop(name))),
    "an entry more": (Code.BAD_NAMES, _with(lambda named, name: named.update({"change/more": torch.zeros(2)}))),
    "an undeclared field": (Code.BAD_NAMES, _with(lambda named, name: named.update({"state/v": torch.zeros(2)}))),
    "another name": (Code.BAD_NAMES, _with(lambda named, name: _rename(named, name, name + "x"))),
    "a name that is a path": (Code.BAD_NAMES, _with(lambda named, name: _rename(named, name, "../../server"))),
    "a transposed weight": (Code.BAD_SHAPE, _with(lambda named, name: named.update({name: named[name].T}))),
    "a flat weight": (Code.BAD_SHAPE, _with(lambda named, name: named.update({name: named[name].flatten()}))),
    "an empty weight": (Code.BAD_SHAPE, _with(lambda named, name: named.update({name: torch.zeros(0)}))),
    "a larger weight": (Code.BAD_SHAPE, _with(lambda named, name: named.update({name: torch.zeros(99, 99)}))),
    "half precision": (Code.BAD_DTYPE, _with(lambda named, name: named.update({name: named[name].half()}))),
    "double precision": (Code.BAD_DTYPE, _with(lambda named, name: named.update({name: named[name].double()}))),
    "integers": (Code.BAD_DTYPE, _with(lambda named, name: named.update({name: named[name].int()}))),
    "booleans": (Code.BAD_DTYPE, _with(lambda named, name: named.update({name: named[name] > 0}))),
    "one NaN": (Code.NOT_FINITE, _set(float("nan"))),
    "one infinity": (Code.NOT_FINITE, _set(float("inf"))),
    "minus infinity": (Code.NOT_FINITE, _set(float("-inf"))),
    "a NaN loss": (Code.NOT_FINITE, _with(lambda named, name: named["loss"].fill_(float("nan")))),
    "a huge number": (Code.NORM_TOO_LARGE, _set(1e30)),
    "a boosted update": (Code.NORM_TOO_LARGE, _with(lambda named, name: named[name].add_(1e6))),
    "a form that is not this method's": (Code.BAD_FORM, _sparse([0], [1.0], None)),
    "a form that does not exist": (Code.BAD_FORM, _with(lambda named, name: _rename(named, name, f"{name}#zip.x"))),
    "a form beside the weight": (
        Code.BAD_FORM,
        _with(lambda named, name: named.update({f"{name}#sparse.shape": torch.tensor([1])})),
    ),
}


def generated(seed: int, update: Update, payload: bytes) -> Made:
    """Return a malformed update that depends on the seed: changed bytes, tensors, or fields."""
    dice = random.Random(seed)
    kind = dice.randrange(8)
    if kind == 0:
        return update, dice.randbytes(dice.randrange(0, 2000))
    if kind == 1:
        return update, payload[: dice.randrange(len(payload))]
    if kind == 2:  # bytes of the header
        data = bytearray(payload)
        (length,) = struct.unpack("<Q", payload[:8])
        for _ in range(dice.randint(1, 8)):
            data[dice.randrange(8 + length)] = dice.randrange(256)
        return update, bytes(data)
    if kind == 3:
        field = dice.choice(["round", "model", "samples"])
        value: Any = dice.randbytes(32).hex() if field == "model" else dice.randrange(2**40)
        return update.model_copy(update={field: value}), payload
    named = {name: leaf.clone() for name, leaf in wire.decode_named(payload).items()}
    name = dice.choice(sorted(named))
    if kind == 4:
        flat = named[name].view(-1)
        flat[dice.randrange(len(flat))] = dice.choice([float("nan"), float("inf"), -float("inf"), 1e30, -1e38])
    elif kind == 5:
        shape = [dice.randrange(0, 9) for _ in range(dice.randrange(1, 5))]
        right = shape == list(named[name].shape)  # zeros of the right shape would be a fine update
        named[name] = torch.zeros([*shape, 1] if right else shape)
    elif kind == 6:
        named[name] = named[name].to(dice.choice([torch.float16, torch.float64, torch.int8, torch.int64, torch.bool]))
    else:
        form = dice.choice(["factored.u", "sparse.places", "masked.mask", "quantized.codes", "x", "", "sparse.shape"])
        named[f"{dice.choice([name, name[:-1], 'state/' + name])}#{form}"] = named.pop(name)
    return update, saved(named)
