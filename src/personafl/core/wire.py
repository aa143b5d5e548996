"""What crosses between machines: trees of tensors as bytes, and the compact forms a weight may travel in.

The format is safetensors (never pickle). A leaf is a plain tensor, or one of the forms below, which restore it with
`dense()`. Sizes are those of the bytes that would be sent, header included.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from personafl.core import tree
from personafl.core.prox import from_matrix
from personafl.core.tree import Tree
from personafl.errors import BadInput

T = TypeVar("T")


def _shape_of(weight: Tensor) -> Tensor:
    return torch.tensor(weight.shape, dtype=torch.int32)


class Factored(NamedTuple):
    """A low-rank weight: matrix form (`prox.as_matrix`) = u @ v."""

    u: Tensor  # [rows, rank]
    v: Tensor  # [rank, columns]
    shape: Tensor  # of the weight

    @staticmethod
    def of(weight: Tensor, u: Tensor, v: Tensor) -> Factored | Tensor:
        """Return the factors of a weight if they are smaller than the weight itself, else u @ v in its shape."""
        if u.numel() + v.numel() < weight.numel():
            return Factored(u, v, _shape_of(weight))
        return from_matrix(u @ v, weight.shape).contiguous()

    def dense(self) -> Tensor:
        """Return the weight."""
        return from_matrix(self.u @ self.v, torch.Size(self.shape.tolist())).contiguous()

    def sound(self, entries: int) -> bool:
        """Say whether the parts, which may come from anywhere, fit together."""
        if self.u.ndim != 2 or self.v.ndim != 2 or self.u.dtype != self.v.dtype:
            return False
        return self.u.shape[1] == self.v.shape[0] and self.u.shape[0] * self.v.shape[1] == entries


class Sparse(NamedTuple):
    """A weight with few non-zero entries."""

    places: Tensor  # [nonzeros] int32, in the flattened weight
    values: Tensor  # [nonzeros]
    shape: Tensor

    @staticmethod
    def of(weight: Tensor) -> Sparse:
        """Keep the non-zero entries."""
        flat = weight.reshape(-1)
        places = flat.nonzero().reshape(-1)
        return Sparse(places.to(torch.int32), flat[places], _shape_of(weight))

    def dense(self) -> Tensor:
        """Return the weight."""
        shape = self.shape.tolist()
        flat = self.values.new_zeros(math.prod(shape))
        flat[self.places.long()] = self.values
        return flat.reshape(shape)

    def sound(self, entries: int) -> bool:
        """Say whether the parts, which may come from anywhere, fit together."""
        if self.places.dtype != torch.int32 or self.places.ndim != 1 or self.places.shape != self.values.shape:
            return False
        return bool(((self.places >= 0) & (self.places < entries)).all())


class Masked(NamedTuple):
    """A weight with some non-zero entries: a bit for each entry says whether it is one of them."""

    mask: Tensor  # [bytes] uint8, the first entry is the highest bit
    values: Tensor  # [nonzeros]
    shape: Tensor

    @staticmethod
    def of(weight: Tensor) -> Masked:
        """Keep the non-zero entries."""
        flat = weight.reshape(-1)
        return Masked(_packed(flat != 0), flat[flat != 0], _shape_of(weight))

    def _bits(self) -> Tensor:
        return ((self.mask[:, None] >> _shifts(self.mask)) & 1).reshape(-1).bool()

    def dense(self) -> Tensor:
        """Return the weight."""
        shape = self.shape.tolist()
        flat = self.values.new_zeros(math.prod(shape))
        flat[self._bits()[: len(flat)]] = self.values
        return flat.reshape(shape)

    def sound(self, entries: int) -> bool:
        """Say whether the parts, which may come from anywhere, fit together."""
        if self.mask.dtype != torch.uint8 or self.mask.ndim != 1 or self.values.ndim != 1:
            return False
        whole = self.mask.numel() == math.ceil(entries / 8)
        return whole and int(self._bits()[:entries].sum()) == len(self.values)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=like.device)


def _packed(bits: Tensor) -> Tensor:
    """Return bits [entries] in bytes."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8))
    return (padded.reshape(-1, 8) << _shifts(bits)).sum(-1).to(torch.uint8)


class Quantized(NamedTuple):
    """A weight whose entries take one of m values: ⌈log₂ m⌉ bits an entry, packed, and the m centers."""

    codes: Tensor  # [bytes] uint8
    centers: Tensor  # [m]
    shape: Tensor

    @staticmethod
    def of(codes: Tensor, centers: Tensor) -> Quantized:
        """Pack codes (integers below m, in the shape of the weight)."""
        width = Quantized.bits(centers)
        flat = codes.reshape(-1).cpu().numpy().astype(np.uint16)
        bits = (flat[:, None] >> np.arange(width, dtype=np.uint16)) & 1
        packed = np.packbits(bits.reshape(-1).astype(np.uint8))
        return Quantized(torch.from_numpy(packed).to(centers.device), centers, _shape_of(codes))

    @staticmethod
    def bits(centers: Tensor) -> int:
        """Return the bits of a code: ⌈log₂ m⌉, at least 1."""
        return max(1, (len(centers) - 1).bit_length())

    def unpacked(self) -> Tensor:
        """Return the codes, int64, in the shape of the weight."""
        shape, width = self.shape.tolist(), self.bits(self.centers)
        bits = np.unpackbits(self.codes.cpu().numpy(), count=math.prod(shape) * width)
        codes = (bits.reshape(-1, width).astype(np.int64) << np.arange(width)).sum(axis=1)
        return torch.from_numpy(codes).reshape(shape).to(self.centers.device)

    def dense(self) -> Tensor:
        """Return the weight."""
        return self.centers[self.unpacked()]

    def sound(self, entries: int) -> bool:
        """Say whether the parts, which may come from anywhere, fit together."""
        if self.codes.dtype != torch.uint8 or self.codes.ndim != 1 or self.centers.ndim != 1 or not len(self.centers):
            return False
        whole = self.codes.numel() == math.ceil(entries * self.bits(self.centers) / 8)
        return whole and bool((self.unpacked() < len(self.centers)).all())


_FORMS = {form.__name__.lower(): form for form in (Factored, Sparse, Masked, Quantized)}


def is_form(node: object) -> bool:
    """Say whether a node of a message is a weight in a compact form."""
    return isinstance(node, Factored | Sparse | Masked | Quantized)


def compact(weight: Tensor) -> Tensor | Sparse | Masked:
    """Return the non-zero entries of a weight in the form that takes least room, or the weight itself."""
    form = smallest(weight, int(weight.count_nonzero()))
    if form is Sparse:
        return Sparse.of(weight)
    return Masked.of(weight) if form is Masked else weight


def kept(weight: Tensor, places: Tensor) -> Tensor | Sparse | Masked:
    """Return the entries at places [k] of the flattened weight, all different, in the form that takes least room.

    Only k decides which form that is and how large, so clients with one k can be stacked.
    """
    places = places.sort().values
    flat, shape = weight.reshape(-1), _shape_of(weight)
    form = smallest(weight, len(places))
    if form is Sparse:
        return Sparse(places.to(torch.int32), flat[places], shape)
    bits = torch.zeros_like(flat, dtype=torch.bool).scatter(0, places, torch.ones_like(places, dtype=torch.bool))
    return (
        Masked(_packed(bits), flat[places], shape)
        if form is Masked
        else torch.where(bits, flat, 0).reshape(weight.shape)
    )


def smallest(weight: Tensor, entries: int) -> type[Tensor] | type[Sparse] | type[Masked]:
    """Return which form takes least room for so many non-zero entries of a weight."""
    each = weight.element_size()
    room = {
        Tensor: weight.numel() * each,
        Sparse: entries * (each + 4),
        Masked: entries * each + math.ceil(weight.numel() / 8),
    }
    return min(room, key=lambda form: room[form])


def dense(message: T) -> T:
    """Return the message with every compact form restored to a plain tensor."""
    result: T = pytree.tree_map(lambda leaf: leaf.dense() if is_form(leaf) else leaf, message, is_leaf=is_form)
    return result


def dense_each(stacked: T) -> T:
    """Return stacked messages [clients, …] with every compact form restored: one form of the stack at a time."""

    def restored(leaf: Tree) -> Tensor:
        if not is_form(leaf):
            return leaf  # type: ignore[no-any-return]
        rows = range(len(leaf.shape))
        return torch.stack([type(leaf)(*(part[row] for part in leaf)).dense() for row in rows])

    result: T = pytree.tree_map(restored, stacked, is_leaf=is_form)
    return result


def parameters(message: Tree) -> int:
    """Return how many numbers a model in compact forms has: of factors their entries, of a sparse weight its values."""

    def count(leaf: Tree) -> int:
        if isinstance(leaf, Factored):
            return leaf.u.numel() + leaf.v.numel()
        if isinstance(leaf, Sparse | Masked):
            return leaf.values.numel()
        return math.prod(leaf.shape.tolist()) if isinstance(leaf, Quantized) else leaf.numel()

    return sum(map(count, pytree.tree_leaves(message, is_leaf=is_form)))


def ranks(message: Tree) -> dict[str, int]:
    """Return the rank of every weight that travels as factors, by its path."""
    entries = pytree.tree_leaves_with_path(message, is_leaf=is_form)
    return {tree.path_name(path): leaf.u.shape[1] for path, leaf in entries if isinstance(leaf, Factored)}


def centers(message: Tree) -> dict[str, list[float]]:
    """Return the centers of every quantized weight, in ascending order, by its path."""
    entries = pytree.tree_leaves_with_path(message, is_leaf=is_form)
    return {
        tree.path_name(path): leaf.centers.sort().values.tolist()
        for path, leaf in entries
        if isinstance(leaf, Quantized)
    }


def density(message: Tree) -> float:
    """Return the share of all entries of the weights that are not 0."""
    leaves = tree.leaves(dense(message))
    return sum(int(leaf.count_nonzero()) for leaf in leaves) / max(1, sum(leaf.numel() for leaf in leaves))


def _named(message: Tree) -> dict[str, Tensor]:
    """{name: tensor}; a compact form's parts are named `path#form.part`, so the bytes describe themselves."""
    named: dict[str, Tensor] = {}
    for path, leaf in pytree.tree_leaves_with_path(message, is_leaf=is_form):
        name = tree.path_name(path)
        if is_form(leaf):
            form = type(leaf).__name__.lower()
            named |= {f"{name}#{form}.{part}": value for part, value in leaf._asdict().items()}
        else:
            named[name] = leaf
    return named


def encode(message: Tree) -> bytes:
    """Return the bytes of a message or state; none for one without tensors."""
    named = {name: value.detach().cpu().contiguous() for name, value in _named(message).items()}
    return _saved(named)


def _saved(named: dict[str, Tensor]) -> bytes:
    seen: set[int] = set()
    for name, value in named.items():
        storage = value.untyped_storage().data_ptr()
        if storage in seen:  # safetensors refuses tensors that share memory, as a fresh state's may
            named[name] = value.clone()
        seen.add(storage)
    return safetensors.torch.save(named) if named else b""


def decode(data: bytes, like: T) -> T:
    """Return the message in `data`, compact forms kept; `like` is any dense message of the expected structure."""
    return from_named(decode_named(data), like)


def from_named(named: dict[str, Tensor], like: T) -> T:
    """Return the message that tensors by name are; `like` is any dense message of the expected structure."""
    found: dict[str, dict[str | None, Tensor]] = {}
    for name, value in named.items():
        path, mark, part = name.partition("#")
        found.setdefault(path, {})[part if mark else None] = value  # None: a plain tensor
    expected = tree.flatten(like)
    if found.keys() != expected.keys():
        wrong = sorted(found.keys() ^ expected.keys())
        raise BadInput(f"message: entries {', '.join(wrong[:5])} are missing or not expected")
    return tree.unflatten(like, {path: _restored(path, leaf, expected[path]) for path, leaf in found.items()})


def decode_named(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a flat message by name."""
    try:
        named: dict[str, Tensor] = safetensors.torch.load(data) if data else {}
    except (safetensors.SafetensorError, KeyError, ValueError) as error:  # KeyError: a dtype torch does not have
        raise BadInput(f"message: not a valid safetensors payload ({error})") from error
    return named


def _restored(path: str, leaf: dict[str | None, Tensor], like: Tensor) -> Tree:
    if leaf.keys() == {None}:
        return leaf[None]
    form = str(next(iter(leaf))).partition(".")[0]
    kind = _FORMS.get(form)
    if kind is None or leaf.keys() != {f"{form}.{part}" for part in kind._fields}:
        raise BadInput(f"message: entry {path} has an unknown form")
    if leaf[f"{form}.shape"].tolist() != list(like.shape):  # else a few bytes could claim any amount of memory
        raise BadInput(f"message: entry {path} should have shape {list(like.shape)}")
    restored = kind(*(leaf[f"{form}.{part}"] for part in kind._fields))
    if not restored.sound(like.numel()):
        raise BadInput(f"message: the parts of entry {path} do not make up one {form} weight")
    return restored


def size(message: Tree) -> int:
    """Return len(encode(message)) without moving any data."""
    return _size(tuple((name, leaf.dtype, leaf.shape) for name, leaf in _named(message).items()))


def size_of_one(stacked: Tree) -> int:
    """Return the size of one entry of a stacked message."""
    return _size(tuple((name, leaf.dtype, leaf.shape[1:]) for name, leaf in _named(stacked).items()))


@functools.lru_cache(maxsize=4096)
def _size(signature: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> int:
    # The header's length depends on names, shapes and offsets: let the library write it once per signature.
    return len(_saved({name: torch.empty(shape, dtype=dtype) for name, dtype, shape in signature}))
