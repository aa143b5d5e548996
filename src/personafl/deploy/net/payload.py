"""Checks of what another machine sent, before it touches anything: each failure has a code of its own.

What is allowed is a list, the names in a message of the declared type; all else is refused.
"""

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from personafl.core import tree, wire
from personafl.core.tree import Tree
from personafl.deploy.net.messages import Code, Refused
from personafl.errors import BadInput

T = TypeVar("T")
_PARTS, _DESCRIBED = 5, 200  # of an entry at most, and bytes of the header for each of them besides its name
_PART, _CLEARLY = 2**16, 0.9  # numbers whose squares are added in their own precision; of a bound, for sure below it
_FEW = 2**13  # of them at a time, where more would be shared out to threads
_BROKEN = (RuntimeError, TypeError, ValueError, IndexError, OverflowError, BadInput)


def check_declared(upload: Any, declared: type[Any]) -> None:
    """Fail if an upload is of another type than its rule declares: it must not leave the device."""
    if type(upload) is not declared:
        raise BadInput(f"method: wants to send a {type(upload).__name__}, and declares {declared.__name__}; not sent")
    _check_names(tree.flatten(wire.dense(upload)).keys(), declared)


def most_bytes(like: Tree) -> int:
    """Return how large the bytes of a message may be: those of a dense one, and some for the names of its parts."""
    return wire.size(wire.dense(like)) * 5 // 4 + 2**16


def opened_update(data: bytes, like: Tree, declared: type[Any], norm_bound: float) -> Tree:
    """Return the dense upload in the bytes that a device sent, or refuse them. `like` is one of the same structure."""
    entries = pytree.tree_leaves_with_path(like, is_leaf=wire.is_form)
    forms = {tree.path_name(path): type(leaf) for path, leaf in entries}
    upload = _opened(data, like, declared, forms)[1]
    if math.sqrt(_about(tree.leaves(upload))) < _CLEARLY * norm_bound:
        return upload
    total = 0.0
    for name, leaf in tree.flatten(upload).items():
        if not leaf.is_floating_point():
            continue
        if not bool(torch.isfinite(leaf).all()):
            raise Refused(Code.NOT_FINITE, f"{name} has numbers that are not finite")
        total += float(leaf.to(torch.float64).square().sum())
    if math.sqrt(total) > norm_bound:
        raise Refused(Code.NORM_TOO_LARGE, f"the norm is {math.sqrt(total):.3g}, at most {norm_bound:.3g} is taken")
    return upload


class Checker:
    """Checks updates of one structure. A header that was found right describes others as well: it is read once."""

    def __init__(self, like: Tree, declared: type[Any], norm_bound: float) -> None:
        self._like, self._declared, self._bound = like, declared, norm_bound
        self._right, self._size = b"", 0  # a header of plain tensors, and what it takes with them
        self._is_flat = {leaf.dtype for leaf in tree.leaves(wire.dense(like))} == {torch.float32}

    def check(self, data: bytes) -> None:
        """Refuse the bytes that a device sent unless they are an update."""
        header = data[: 8 + int.from_bytes(data[:8], "little")]
        if header != self._right or math.sqrt(self._squares(data, len(header))) >= _CLEARLY * self._bound:
            opened_update(data, self._like, self._declared, self._bound)
            if b"#" not in header:
                self._right, self._size = header, len(data)

    def _squares(self, data: bytes, begin: int) -> float:
        """Return the same as `_about` of an update with the right header; where it is, if its numbers are alike."""
        if len(data) != self._size or not self._is_flat or begin % 4:
            return _about(_named(data).values())
        numbers = np.frombuffer(data, np.float32, offset=begin)
        parts = (numbers[start : start + _FEW] for start in range(0, len(numbers), _FEW))
        with np.errstate(over="ignore", invalid="ignore"):
            total = math.fsum(float(np.dot(part, part)) for part in parts)
        return total if math.isfinite(total) else math.inf


def check_finite(message: Tree) -> None:
    """Refuse numbers that are not finite."""
    for name, leaf in tree.flatten(wire.dense(message)).items():
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise Refused(Code.NOT_FINITE, f"{name} has numbers that are not finite")


def _about(leaves: Iterable[Tensor]) -> float:
    """Return the square of an upload's norm to a percent, soon; inf where that is not certain."""
    total = 0.0
    for leaf in leaves:
        if leaf.is_floating_point():
            if leaf.dtype not in (torch.float32, torch.float64):
                return math.inf
            for part in torch.split(leaf.reshape(-1), _PART):  # or small numbers would be lost beside a large sum
                total += float(torch.dot(part, part))
    return total if math.isfinite(total) else math.inf


def opened(data: bytes, like: T, declared: type[Any]) -> T:
    """Return the message in bytes from elsewhere, compact forms kept, or refuse them."""
    return _opened(data, like, declared, None)[0]


def _opened(data: bytes, like: T, declared: type[Any], forms: dict[str, type[Any]] | None) -> tuple[T, T]:
    """Return the same, and dense; `forms` are those that each entry may have besides a plain tensor, None: any."""
    shapes = tree.flatten(expected := wire.dense(like))
    if int.from_bytes(data[:8], "little") > 2**12 + sum(_PARTS * (len(path) + _DESCRIBED) for path in shapes):
        raise Refused(Code.BAD_PAYLOAD, "its header describes more than is expected")  # and takes seconds to read
    named = _named(data)
    paths = {name.partition("#")[0] for name in named}
    _check_names(paths, declared)
    if paths != shapes.keys():
        wrong = sorted(paths ^ shapes.keys())
        raise Refused(Code.BAD_NAMES, f"entries {', '.join(wrong[:3])[:200]} are missing or not expected")
    for name, value in named.items():
        path, mark, part = name.partition("#")
        if mark:
            _check_form(path, part, value, shapes[path], forms)
        elif value.shape != shapes[path].shape:
            raise Refused(Code.BAD_SHAPE, f"{path} should have shape {list(shapes[path].shape)}")
        elif value.dtype != shapes[path].dtype:
            raise Refused(Code.BAD_DTYPE, f"{path} should be {shapes[path].dtype}")
    try:
        message = wire.from_named(named, expected)
        plain = wire.dense(message)
    except _BROKEN as error:
        raise Refused(Code.BAD_FORM, str(error).splitlines()[0][:200] if str(error) else "bad form") from error
    for path, value in tree.flatten(plain).items():
        if value.dtype != shapes[path].dtype:
            raise Refused(Code.BAD_DTYPE, f"{path} should be {shapes[path].dtype}")
    return message, plain


def _named(data: bytes) -> dict[str, Tensor]:
    try:
        return wire.decode_named(data)
    except (*_BROKEN, MemoryError) as error:
        raise Refused(Code.BAD_PAYLOAD, "not a safetensors payload") from error


def _check_names(paths: Any, declared: type[Any]) -> None:
    undeclared = sorted(path for path in paths if path.partition("/")[0] not in declared._fields)
    if undeclared:
        raise Refused(Code.BAD_NAMES, f"entry {undeclared[0][:100]} is not of {declared.__name__}: {declared._fields}")


def _check_form(path: str, part: str, value: Tensor, like: Tensor, forms: dict[str, type[Any]] | None) -> None:
    form, _, field = part.partition(".")
    if forms is not None and forms[path].__name__.lower() != form:
        raise Refused(Code.BAD_FORM, f"{path} may not come in the form {form[:50]!r}")
    if field == "shape":
        if value.dtype != torch.int32 or value.ndim != 1:
            raise Refused(Code.BAD_FORM, f"the shape of {path} is not one")
        if value.tolist() != list(like.shape):
            raise Refused(Code.BAD_SHAPE, f"{path} should have shape {list(like.shape)}")
