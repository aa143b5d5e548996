"""What a robust rule is: a choice by the vectors' geometry, and a reduction of each coordinate.

Of n vectors x_1 … x_n in R^d, at most f hostile, every rule here has two halves:

    rows   = M X,  M [m, n] a function of the Gram matrix G = X Xᵀ alone,  X [n, d]
    result = r(rows), one coordinate after the other

Krum's M has one row with a single 1; a coordinate median's is the identity. What is done before a rule (`Mix`) has the
first half alone, and its matrices multiply: (B M) X has the Gram matrix (B M) G (B M)ᵀ. So the vectors are read twice,
in chunks of coordinates, whatever the rule and however large they are; and all that looks at several vectors at once is
done with n × n numbers. Distances are ‖x_i − x_j‖² = G_ii + G_jj − 2 G_ij, in float64.

Whoever is equally near goes by the order of the vectors, the first one first.
"""

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.errors import BadInput

CHUNK = 2**16  # coordinates that are in float64 at a time
Columns = Callable[[], Iterator[Tensor]]  # the vectors [n, d], once more from the beginning, as parts [n, some] of them


@dataclass(frozen=True, kw_only=True)
class Mix(ABC):
    """What is done with vectors before a rule: each new one is a sum of old ones, with weights."""

    f: int = 0

    @abstractmethod
    def mix(self, gram: Tensor, key: int) -> Tensor:
        """Return the weights [m, n] of the old vectors in the new ones; `key` is for who draws at random."""

    def check(self, n: int) -> None:
        """Fail if so many vectors cannot hold out against f hostile ones."""
        if n < 2 * self.f + 1:
            raise _too_few(type(self).__name__, n, self.f, 2 * self.f + 1)

    def __call__(self, vectors: Tensor, key: int = 0) -> Tensor:
        """Return the new vectors, [m, d]."""
        self.check(len(vectors))
        exact = vectors.to(torch.float64)
        mixed: Tensor = self.mix((exact @ exact.T).cpu(), key).to(exact) @ exact
        return mixed.to(vectors.dtype)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule that makes one vector of n, of which f may be hostile."""

    by_distance: ClassVar[bool] = True  # whether the Gram matrix is used
    from_centre: ClassVar[bool] = False  # whether a guess of the result is the last of the vectors
    f: int = 0

    @property
    def least(self) -> int:
        """The fewest vectors that it holds with."""
        return 2 * self.f + 1

    def check(self, n: int) -> None:
        """Fail if it does not hold with so many vectors."""
        if n < self.least:
            raise _too_few(type(self).__name__, n, self.f, self.least)

    def mix(self, gram: Tensor) -> Tensor | None:
        """Return M [m, n]; None: the identity."""
        return None

    def reduce(self, rows: Tensor) -> Tensor:
        """Return one number for each coordinate of rows [m, some]."""
        return rows[0]

    def __call__(self, vectors: Tensor, centre: Tensor | None = None) -> Tensor:
        """Return the result [d] for vectors [n, d]."""
        stack = vectors
        if self.from_centre:
            first = torch.zeros_like(vectors[0]) if centre is None else centre
            stack = torch.cat([vectors, first.unsqueeze(0)])
        columns = functools.partial(parts_of, stack)
        return torch.cat(list(aggregated(self, columns, len(vectors)))).to(vectors.dtype)


def parts_of(vectors: Tensor, some: int = CHUNK) -> Iterator[Tensor]:
    """Yield vectors [n, d] in float64, some coordinates at a time."""
    for begin in range(0, vectors.shape[1], some):
        yield vectors[:, begin : begin + some].to(torch.float64)


def aggregated(rule: Rule, columns: Columns, n: int, before: Sequence[Mix] = (), key: int = 0) -> Iterator[Tensor]:
    """Yield the result of a rule, part by part, for n vectors that come in parts, after what is done before it.

    Where the rule starts from a centre, that is the last row of each part, and n is without it.
    """
    yield from reduced(rule, columns, mixing(rule, columns, n, before, key))


def reduced(rule: Rule, columns: Columns, mixed: Tensor | None) -> Iterator[Tensor]:
    """Yield the result of a rule, part by part, given the weights [m, n] of the vectors in the rows that it reduces."""
    for part in columns():
        yield rule.reduce(part if mixed is None else mixed.to(part) @ part)


def mixing(rule: Rule, columns: Columns, n: int, before: Sequence[Mix], key: int) -> Tensor | None:
    """Return the weights of the vectors in the rows that a rule reduces; None: each row is a vector."""
    if not before and not rule.by_distance:
        rule.check(n)
        return None
    gram = gram_of(columns)
    total = torch.eye(len(gram), dtype=torch.float64)
    for step in before:
        step.check(n)
        weights = step.mix(gram[:n, :n], key)
        n = len(weights)
        if rule.from_centre:
            weights = _beside(weights)
        total, gram = weights @ total, weights @ gram @ weights.T
    rule.check(n)
    own = rule.mix(gram)
    return total if own is None else own @ total


def check_size(rule: Rule, before: Sequence[Mix], n: int) -> None:
    """Fail if a rule, after what is done before it, does not hold with n vectors: sizes alone decide."""
    rule.check(n)
    if before:
        blank = torch.zeros(n + int(rule.from_centre), 1)
        mixing(rule, lambda: parts_of(blank), n, before, 0)


def fewest(rule: Rule, before: Sequence[Mix], enough: int) -> int:
    """Return the fewest vectors that a rule holds with, after what is done before it; it does with `enough`."""
    for n in range(1, enough):
        with contextlib.suppress(BadInput):
            check_size(rule, before, n)
            return n
    return enough


def _beside(weights: Tensor) -> Tensor:
    """Return weights of vectors, and of one more that stays as it is."""
    larger = weights.new_zeros(len(weights) + 1, weights.shape[1] + 1)
    larger[:-1, :-1], larger[-1, -1] = weights, 1
    return larger


def gram_of(columns: Columns) -> Tensor:
    """Return X Xᵀ, where decisions are made: on the CPU."""
    total: Tensor | None = None
    for part in columns():
        product = part @ part.T
        total = product if total is None else total + product
    assert total is not None
    return total.cpu()


def squared_distances(gram: Tensor) -> Tensor:
    """Return ‖x_i − x_j‖² [n, n]: the same from both sides to the bit, and 0 for a vector and itself."""
    squares = gram.diagonal()
    found = (squares[:, None] + squares[None, :] - (gram + gram.T)).clamp(min=0)
    return found.fill_diagonal_(0)


def nearest(distances: Tensor, count: int) -> Tensor:
    """Return the places of the `count` smallest of each row, [rows, count]; the first of equals come first."""
    return distances.argsort(dim=-1, stable=True)[..., :count]


def mean_of(places: Tensor, n: int) -> Tensor:
    """Return the weights [rows, n] of means of the vectors at some places [rows, count]."""
    weights = torch.zeros(len(places), n, dtype=torch.float64)
    return weights.scatter_(1, places, 1.0 / places.shape[1])


def _too_few(name: str, n: int, f: int, least: int) -> BadInput:
    return BadInput(
        f"robust: {name} holds against {f} hostile uploads among at least {least}, and here are {n}; "
        "lower robust.f, raise federation.cohort, or take another rule"
    )
