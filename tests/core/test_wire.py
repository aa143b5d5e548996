"""What crosses between machines: round trips, exact sizes, and what is refused."""

from __future__ import annotations

import json
import math
import struct
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from personafl.core import tree, wire
from personafl.core.algorithm import Empty
from personafl.core.prox import as_matrix, nuclear
from personafl.core.wire import Factored, Masked, Quantized, Sparse
from personafl.errors import BadInput

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
laws = settings(max_examples=40, deadline=None)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
seeds = st.integers(0, 10**6)


class Message(NamedTuple):
    weights: dict[str, Any]
    count: Any


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=rng).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@st.composite
def forms(draw: Any) -> tuple[Tensor, Any]:
    """Return (weight, a form of it): plain, factored, sparse, masked, the smallest of these, or quantized."""
    kinds = ["plain", "factored", "sparse", "masked", "compact", "quantized"]
    kind, seed = draw(st.sampled_from(kinds)), draw(seeds)
    rng = torch.Generator().manual_seed(seed)
    if kind == "plain":
        weight = filled(draw(shapes), draw(st.sampled_from(DTYPES)), seed)
        return weight, weight
    if kind == "factored":
        rank = draw(st.integers(0, 2))
        shape = draw(st.sampled_from([(6, 5), (3, 4, 2, 3), (7, 8)]))
        rows, columns = as_matrix(torch.empty(shape)).shape
        u = torch.randint(-3, 4, (rows, rank), generator=rng).double()
        v = torch.randint(-3, 4, (rank, columns), generator=rng).double()
        form = Factored.of(torch.empty(shape, dtype=torch.float64), u, v)
        return form.dense() if isinstance(form, Factored) else form, form
    shape = draw(shapes)
    if kind in ("sparse", "masked", "compact"):
        weight = filled(shape, draw(st.sampled_from(DTYPES)), seed)
        weight = torch.where(torch.rand(shape, generator=rng) < draw(st.sampled_from([0.0, 0.3, 1.0])), weight, 0)
        weight = weight.to(weight.dtype)
        return weight, {"sparse": Sparse.of, "masked": Masked.of, "compact": wire.compact}[kind](weight)
    bits = draw(st.integers(1, 8))
    levels = draw(st.integers(max(1, 2 ** (bits - 1) + 1), 2**bits))
    centers = torch.randn(levels, generator=rng, dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    codes = torch.randint(levels, shape, generator=rng)
    return centers[codes], Quantized.of(codes, centers)


@laws
@given(st.lists(forms(), min_size=1, max_size=4))
def test_round_trip_and_size(entries: list[tuple[Tensor, Any]]) -> None:
    """decode(encode(m)) = m, form by form and bit by bit; dense() restores the weights; size(m) = len(encode(m))."""
    plain = Message({f"w.{i}": weight for i, (weight, _) in enumerate(entries)}, torch.tensor(3))
    message = Message({f"w.{i}": form for i, (_, form) in enumerate(entries)}, torch.tensor(3))
    data = wire.encode(message)
    assert wire.size(message) == len(data)
    got = wire.decode(data, plain)
    assert isinstance(got, Message)
    for i, (weight, form) in enumerate(entries):
        again = got.weights[f"w.{i}"]
        assert type(again) is type(form)
        assert all(same(x, y) for x, y in zip(tree.leaves(again), tree.leaves(form), strict=True))
        assert same(wire.dense(got).weights[f"w.{i}"], weight)
        assert same(wire.dense(message).weights[f"w.{i}"], weight)
    assert same(got.count, torch.tensor(3))


@laws
@given(st.integers(1, 4), st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=3))
def test_size_of_one_is_the_size_of_an_entry_of_the_stack(clients: int, leaves: list[Any]) -> None:
    """size_of_one(stack(ms)) = len(encode(m)) for each m."""
    one = {str(i): filled(shape, dtype, i) for i, (shape, dtype) in enumerate(leaves)}
    assert wire.size_of_one(tree.stack([one] * clients)) == len(wire.encode(one))


@pytest.mark.parametrize(
    ("entries", "form"), [(0, Sparse), (31, Sparse), (33, Masked), (960, Masked), (993, Tensor), (1024, Tensor)]
)
def test_the_smallest_form_is_chosen(entries: int, form: type) -> None:
    """1024 single-precision entries: places take 8 bytes each, a mask 128 and 4 each, the weight itself 4096."""
    weight = torch.zeros(32, 32)
    weight.view(-1)[torch.randperm(1024, generator=torch.Generator().manual_seed(entries))[:entries]] = 1.5
    assert isinstance(wire.compact(weight), form)
    sizes = {len(wire.encode({"w": found})) for found in (Sparse.of(weight), Masked.of(weight), weight)}
    header = 300  # of the longest
    assert len(wire.encode({"w": wire.compact(weight)})) <= min(sizes) + header


@laws
@given(st.integers(1, 40), st.integers(0, 40), seeds)
def test_kept_entries_stack_and_restore(size: int, count: int, seed: int) -> None:
    """`kept` keeps what is at the places, 0 elsewhere, in any order, also under vmap; `dense_each` restores a stack."""
    count = min(count, size)
    rng = torch.Generator().manual_seed(seed)
    weights = torch.randn((3, size), generator=rng)
    places = torch.stack([torch.randperm(size, generator=rng)[:count] for _ in range(3)])
    stacked = torch.func.vmap(wire.kept)(weights, places)
    expected = torch.zeros(3, size).scatter(1, places, weights.gather(1, places))
    assert torch.equal(wire.dense_each({"w": stacked})["w"], expected)
    one = wire.kept(weights[0], places[0])
    assert wire.size_of_one({"w": stacked}) == len(wire.encode({"w": one}))
    assert torch.equal(wire.dense({"w": one})["w"], expected[0])


def test_size_of_one_with_stacked_forms() -> None:
    """Compact forms stack part by part."""
    form = Quantized.of(torch.tensor([[0, 1], [1, 0]]), torch.tensor([-1.0, 1.0]))
    assert wire.size_of_one({"w": tree.stack([form] * 3)}) == len(wire.encode({"w": form}))


def test_nothing_is_sent_for_nothing() -> None:
    """A message without tensors takes no bytes, and comes back from none."""
    assert wire.encode(Empty()) == b""
    assert wire.size(Empty()) == wire.size_of_one(Empty()) == 0
    assert wire.decode(b"", Empty()) == Empty()
    assert wire.decode(b"", {"personal": {}}) == {"personal": {}}


def test_nothing_is_no_message_where_one_is_expected() -> None:
    """No bytes for a message with tensors, and bytes for one without, are refused."""
    with pytest.raises(BadInput, match=r"entries w "):
        wire.decode(b"", {"w": torch.zeros(1)})
    with pytest.raises(BadInput, match=r"entries w "):
        wire.decode(wire.encode({"w": torch.zeros(1)}), Empty())


def test_bare_and_scalar_tensors() -> None:
    """A tensor alone is a message too."""
    for value in (torch.tensor(2.5), torch.zeros(0), torch.ones(2, 3)):
        assert same(wire.decode(wire.encode(value), value), value)
        assert wire.size(value) == len(wire.encode(value))


def test_tensors_that_share_memory() -> None:
    """A fresh state may hold the same tensor twice, a transposed view, or slices of one: all are written out."""
    w = torch.arange(6.0).reshape(2, 3)
    message = {"w": w, "again": w, "turned": w.T, "row": w[1], "wide": w[0].expand(4, 3)}
    data = wire.encode(message)
    assert len(data) == wire.size(message)
    got = wire.decode(data, message)
    assert all(torch.equal(got[name], message[name]) for name in message)


def test_encode_leaves_the_message_alone() -> None:
    """Gradients, dtype and values are as before."""
    w = torch.ones(2, requires_grad=True)
    wire.encode({"w": w, "again": w})
    assert w.requires_grad
    assert w.tolist() == [1, 1]


def test_factored_of_picks_the_smaller() -> None:
    """6×5: rank 2 takes 2·(6+5) = 22 < 30 numbers, rank 3 takes 33 ≥ 30; 3×6 at rank 2 takes 18: a tie is dense."""
    for (rows, columns), rank, compact in (((6, 5), 2, True), ((6, 5), 3, False), ((3, 6), 2, False)):
        u, v = torch.randn(rows, rank, dtype=torch.float64), torch.randn(rank, columns, dtype=torch.float64)
        form = Factored.of(torch.empty(rows, columns), u, v)
        assert isinstance(form, Factored) is compact
        dense = form.dense() if isinstance(form, Factored) else form
        torch.testing.assert_close(dense, u @ v, rtol=0, atol=1e-14)


def test_factored_restores_a_convolution() -> None:
    """A rank-1 kernel in matrix form comes back in the shape and places of the kernel."""
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    u, v = nuclear(as_matrix(weight), 0.0)
    form = Factored.of(weight, u[:, :1], v[:1])
    assert isinstance(form, Factored)
    torch.testing.assert_close(as_matrix(form.dense()), u[:, :1] @ v[:1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("bits", range(1, 9))
def test_quantized_takes_bits_per_entry(bits: int) -> None:
    """n entries of b bits are ⌈n·b/8⌉ bytes; m = 2^b and m = 2^(b−1)+1 centers need b bits."""
    for levels in {2**bits, 2 ** (bits - 1) + 1}:
        codes = torch.arange(1001) % levels
        form = Quantized.of(codes, torch.randn(levels))
        assert form.codes.numel() == math.ceil(1001 * bits / 8)
        assert torch.equal(form.unpacked(), codes)


def test_two_bits_take_a_sixteenth_of_single_precision() -> None:
    """2 of 32 bits: 1/16 of the bytes, and less than 1 % of that again for centers and header."""
    codes = torch.randint(4, (512, 512))
    form = Quantized.of(codes, torch.randn(4))
    share = wire.size({"w": form}) / wire.size({"w": torch.zeros(512, 512)})
    assert 1 / 16 < share < 1.01 / 16


def test_one_center_takes_one_bit() -> None:
    """m = 1: all entries are the center."""
    form = Quantized.of(torch.zeros(5, dtype=torch.int64), torch.tensor([7.0]))
    assert form.codes.numel() == 1
    assert form.dense().tolist() == [7.0] * 5


LIKE = {"a": torch.zeros(2, 3), "b": torch.zeros(())}
GOOD = wire.encode(LIKE)


@pytest.mark.parametrize(
    ("message", "culprit"),
    [
        ({"a": torch.zeros(2, 3)}, "b"),
        ({**LIKE, "c": torch.zeros(1)}, "c"),
        ({"a": torch.zeros(2, 3), "B": torch.zeros(())}, "B, b"),
        ({"a": (torch.zeros(2, 3),), "b": torch.zeros(())}, "a, a/0"),
    ],
)
def test_missing_and_extra_entries_are_refused_by_name(message: Any, culprit: str) -> None:
    """The error names what is missing or too much."""
    with pytest.raises(BadInput, match=rf"entries {culprit} are"):
        wire.decode(wire.encode(message), LIKE)


@laws
@given(st.integers(1, len(GOOD) - 1))
def test_truncated_payloads_are_refused(length: int) -> None:
    """Any proper prefix."""
    with pytest.raises(BadInput) as caught:
        wire.decode(GOOD[:length], LIKE)
    assert "\n" not in str(caught.value)


@laws
@given(st.binary(min_size=1, max_size=64))
def test_garbage_is_refused(data: bytes) -> None:
    """Bytes that are no message raise BadInput, never anything else."""
    with pytest.raises(BadInput):
        wire.decode(data, LIKE)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_decodes_to_the_structure(place: int, flip: int) -> None:
    """A damaged message either raises BadInput or is a message of the right entries."""
    damaged = bytearray(GOOD)
    damaged[place] ^= flip
    try:
        got = wire.decode(bytes(damaged), LIKE)
    except BadInput:
        return
    assert got.keys() == LIKE.keys()


def test_a_dtype_torch_does_not_have_is_refused() -> None:
    """A well-formed file with an exotic dtype."""
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    data = struct.pack("<Q", len(header)) + header + b"\0"
    with pytest.raises(BadInput):
        wire.decode(data, {"w": torch.zeros(2)})


@pytest.mark.parametrize(
    "parts",
    [
        ["w#zipped.bytes"],
        ["w#sparse.places", "w#sparse.values"],
        ["w#sparse.places", "w#sparse.values", "w#sparse.shape", "w#sparse.more"],
        ["w#factored.u", "w#sparse.values", "w#sparse.shape"],
        ["w#"],
        ["w", "w#sparse.places", "w#sparse.values", "w#sparse.shape"],
    ],
)
def test_unknown_forms_are_refused(parts: list[str]) -> None:
    """A form with another name or none, missing parts, extra parts, mixed parts, or a weight given twice."""
    data = safetensors.torch.save({name: torch.zeros(1) for name in parts})
    with pytest.raises(BadInput, match="entry w has an unknown form"):
        wire.decode(data, {"w": torch.zeros(1)})


SHAPE = torch.tensor([2, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    "form",
    [
        Sparse(torch.tensor([6], dtype=torch.int32), torch.ones(1), SHAPE),  # beyond the last entry
        Sparse(torch.tensor([-1], dtype=torch.int32), torch.ones(1), SHAPE),  # would wrap
        Sparse(torch.tensor([0, 1], dtype=torch.int32), torch.ones(1), SHAPE),  # would broadcast
        Sparse(torch.tensor([0.0]), torch.ones(1), SHAPE),
        Masked(torch.tensor([0b11000000], dtype=torch.uint8), torch.ones(1), SHAPE),  # two entries, one value
        Masked(torch.tensor([0b00000011], dtype=torch.uint8), torch.ones(2), SHAPE),  # beyond the last entry
        Masked(torch.zeros(2, dtype=torch.uint8), torch.ones(0), SHAPE),
        Masked(torch.zeros(1), torch.ones(0), SHAPE),
        Factored(torch.ones(2, 1), torch.ones(2, 3), SHAPE),
        Factored(torch.ones(3, 1), torch.ones(1, 3), SHAPE),
        Factored(torch.ones(2), torch.ones(3), SHAPE),
        Factored(torch.ones(2, 1), torch.ones(1, 3, dtype=torch.float64), SHAPE),
        Quantized(torch.zeros(0, dtype=torch.uint8), torch.ones(2), SHAPE),  # numpy would fill up with zeros
        Quantized(torch.zeros(2, dtype=torch.uint8), torch.ones(2), SHAPE),
        Quantized(torch.full((2,), 255, dtype=torch.uint8), torch.ones(3), SHAPE),  # code 3 of 3 centers
        Quantized(torch.zeros(1, dtype=torch.uint8), torch.ones(0), SHAPE),
        Quantized(torch.zeros(1), torch.ones(2), SHAPE),
    ],
)
def test_forms_whose_parts_do_not_fit_are_refused(form: Any) -> None:
    """A form that `dense` could not restore, or would restore to something else, is refused when it arrives."""
    with pytest.raises(BadInput, match="entry w do not make up"):
        wire.decode(wire.encode({"w": form}), {"w": torch.zeros(2, 3)})


def test_a_form_of_another_shape_is_refused() -> None:
    """Else a few bytes (an empty sparse weight of 10¹² entries) would claim any amount of memory at `dense`."""
    bomb = Sparse(torch.zeros(0, dtype=torch.int32), torch.zeros(0), torch.tensor([10**6, 10**6], dtype=torch.int32))
    with pytest.raises(BadInput, match=r"w should have shape \[2, 2\]"):
        wire.decode(wire.encode({"w": bomb}), {"w": torch.zeros(2, 2)})


def test_centers_and_density_of_compact_forms() -> None:
    """Of 4 + 6 + 2 entries 2 + 6 + 1 are not 0: a sparse one has 2 of 4, the quantized one none that is 0."""
    codes = torch.tensor([[0, 1, 2], [2, 1, 0]])
    message = {
        "sparse": Sparse.of(torch.tensor([0.0, 3.0, 0.0, -1.0])),
        "quantized": Quantized.of(codes, torch.tensor([2.0, -1.0, 0.5])),
        "plain": torch.tensor([0.0, 7.0]),
    }
    assert wire.density(message) == 9 / 12
    assert wire.density({}) == 0
    assert wire.centers(message) == {"quantized": [-1.0, 0.5, 2.0]}
