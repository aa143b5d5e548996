"""A robust rule in place of the mean, for any method whose server averages changes.

With Δ_i all that client i sends but its loss, as one vector, the method's server is given

    R(B(Δ_1 · min(1, C/‖Δ_1‖), …, Δ_n · min(1, C/‖Δ_n‖)))

as if that were the mean of the uploads: R is a rule of `robust`, B what is done before it, and the clip C is fixed, or
a running median of norms, or there is none. Uploads count alike, but for the weighted mean, where `most` is the largest
share of a round's weight that one of them has.

Uploads are kept until the round ends, as they came: joining them is concatenation. They are looked at in parts of some
coordinates; for a clipped mean one after the other, so that a server has them on its disk and never in memory. What is
not finite is not honest: it is left out, and is one of the f. Of losses it counts as 0.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from personafl.core import rng, tree, wire
from personafl.core.algorithm import (
    Algorithm,
    ClientRule,
    Empty,
    Problem,
    Reduced,
    join,
    mean_dtypes,
    own_fields,
    untrained_upload,
)
from personafl.core.tree import Params, Tree
from personafl.errors import Diverged
from personafl.robust.clip import RunningMedian
from personafl.robust.mixing import Clip
from personafl.robust.rule import CHUNK, Mix, Rule, mixing, reduced
from personafl.robust.weighing import Mean, capped
from personafl.uploads.around import AroundServer, refusal, sends_losses_alone, uses_mean_alone

_PART = 2**14  # coordinates whose norm is taken at a time: fewer than PyTorch shares out to threads
CLIPPED, LEFT_OUT, FAR = 1, 2, 3  # what became of an upload; 0: it was taken as it came; FAR: clipped to half or less
_ROOM = 2**20  # numbers that are in float64 at a time, however many uploads there are; a cache has them


class Collected(NamedTuple):
    """Uploads as they came, stacked, what each counts, and its norm; the sum of their losses, times that."""

    parts: Sequence[Tree]
    weights: tuple[Tensor, ...]
    norms: tuple[Tensor, ...]
    loss: Tensor

    @property
    def finite(self) -> Tensor:
        """Which of them are finite, [clients]."""
        good = torch.cat(self.norms).isfinite()
        if good.all():
            return good
        return torch.cat([tree.finite(_named(part), len(part.loss)) for part in self.parts])


@own_fields("medians", "centre", "seen", "fates")
class Robust(NamedTuple):
    """State of the server: the method's own, what was seen of norms, and what the rule gave the round before.

    Of several servers each has clients of its own, and so all of these but the method's.
    """

    own: Tree
    medians: Tensor  # of norms, of the last rounds; empty where they are not used
    centre: Tree  # like an upload, in float64; empty where it is not used
    seen: Tensor  # of the last round: the clip, the share of uploads that were clipped, how many were left out
    fates: Tensor  # [clients] of the last round, in the order in which uploads were joined: what became of each


@dataclass(frozen=True, kw_only=True)
class RobustServer(AroundServer):
    """Server rule: another one's, which is given what a robust rule makes of the uploads."""

    averages: ClassVar[bool] = True  # what takes the place of the mean: late changes may be discounted, or dropped
    robust: Rule
    client: ClientRule
    before: tuple[Mix, ...] = ()
    clip: float | RunningMedian | None = None
    most: float | None = None
    seed: int = 0

    def init(self, problem: Problem, start: Params, population: float) -> Robust:
        """Start as the method does."""
        own = self.rule.init(problem, start, population)
        medians = self.clip.blank() if isinstance(self.clip, RunningMedian) else torch.zeros(0, dtype=torch.float64)
        nobody = torch.zeros(0, dtype=torch.int8)
        return Robust(own, medians, self._blank(problem, own), torch.zeros(3, dtype=torch.float64), nobody)

    def _blank(self, problem: Problem, own: Tree) -> Tree:
        """Return the first guess of a rule that has one: 0."""
        if not self.robust.from_centre:
            return Empty()
        down = wire.dense(self.rule.broadcast(own))
        state = self.client.init(problem, down, rng.generator("shape"))
        like = wire.dense(untrained_upload(self.client, problem, down, state))
        return tree.map(lambda leaf: torch.zeros(leaf.shape, dtype=torch.float64, device=leaf.device), like)

    def own(self, state: Robust) -> Tree:
        """Return the method's own state."""
        return state.own

    def join(self, state: Robust, joined: Reduced | None, stacked: Any, weights: Tensor) -> Reduced:
        """Put uploads beside those that are there."""
        weights, norms = weights.to(torch.float64), _norms(stacked)
        loss = (weights * stacked.loss.to(torch.float64).nan_to_num(0, 0, 0)).sum()
        if joined is None:
            return _reduced(Collected((stacked,), (weights,), (norms,), loss), stacked)
        have: Any = joined.total
        parts, counts = (*have.parts, stacked), (*have.weights, weights)
        total = Collected(parts, counts, (*have.norms, norms), have.loss + loss)
        return joined._replace(total=total, weight=joined.weight + weights.sum(), clients=joined.clients + len(weights))

    def collect(self, uploads: Sequence[Any], weights: Tensor) -> Reduced:
        """Return the same as `join` of them all; each is let go of when it was looked at."""
        weights, norms, loss = weights.to(torch.float64), [], torch.zeros((), dtype=torch.float64)
        for upload, weight in zip(uploads, weights, strict=True):
            norms.append(_norms(upload))
            loss = loss + weight * upload.loss[0].to(torch.float64).nan_to_num(0, 0, 0)
        return _reduced(Collected(uploads, (weights,), tuple(norms), loss), uploads[0])

    def update(self, state: Robust, uploads: Reduced, round_: int) -> Robust:
        """Give the method what the rule makes of the uploads."""
        return self.given(*self.handed(state, uploads, round_), round_)

    def given(self, state: Robust, made: Reduced, round_: int) -> Robust:
        """Give the method what rules made of uploads: here, or at several servers with one model."""
        return state._replace(own=self.rule.update(state.own, made, round_))

    def handed(self, state: Robust, uploads: Reduced, round_: int) -> tuple[Robust, Reduced]:
        """Return what the rule makes of the uploads, as if each of them were that; the method's own state stays."""
        have: Any = uploads.total
        seen = _Seen.of(have)
        lost = self._lost(seen, round_)
        clip, medians = self._clip(state, seen)
        weights = self._weights(torch.cat(have.weights), seen)
        if isinstance(self.robust, Mean) and not self.before:  # each by itself: nothing compares uploads
            shares = self._shares(weights, seen, clip)
            mixed: Tensor | None = shares[None]
            found = _summed(have.parts, seen.finite, shares)
        else:
            sent = _Sent.of(have.parts, None if isinstance(state.centre, Empty) else state.centre)
            rule, before = self._holding(lost, clip)
            mixed = mixing(rule, sent.columns, sent.clients, before, int(rng.mix(self.seed, "buckets", round_)))
            found = sent.shaped(have.parts[0], torch.cat(list(reduced(rule, sent.columns, mixed))))
        weight = weights.sum().to(uploads.weight.device)  # of what is left, after a cap: a claim is not handed on
        total = tree.map(lambda leaf: leaf * weight, found)._replace(loss=have.loss / uploads.weight * weight)
        made = Reduced(total, weight, uploads.clients, uploads.dtypes.parts[0])
        centre = found if self.robust.from_centre else state.centre
        share = 0.0 if clip is None else float((seen.norms > clip).to(torch.float64).mean())
        met = torch.tensor([clip or 0.0, share, lost], dtype=torch.float64)
        return Robust(state.own, medians, centre, met, seen.fates(clip, mixed)), made

    def told(self, state: Robust) -> dict[str, float]:
        """Return what the last round's uploads met, and what the method tells."""
        clip, clipped, lost = state.seen.tolist()
        told = {"clip": clip, "clipped": clipped} if self.clip is not None else {}
        return {**told, "left_out": lost, **super().told(state)}

    def _lost(self, seen: "_Seen", round_: int) -> int:
        """Return how many uploads are not finite; fail if those are too many."""
        every = len(seen.finite)
        lost = every - len(seen.norms)
        if lost == every or (lost > self.robust.f and not isinstance(self.robust, Mean)):
            raise Diverged(
                f"round {round_ + 1}: {lost} of {every} uploads are not finite, more than robust.f; lower "
                "training.lr, or raise robust.f"
            )
        return lost

    def _clip(self, state: Robust, seen: "_Seen") -> tuple[float | None, Tensor]:
        """Return the clip of a round, if there is one, and the medians of norms."""
        if isinstance(self.clip, RunningMedian):
            return self.clip.moved(state.medians, seen.norms)
        return self.clip, state.medians

    def _weights(self, weights: Tensor, seen: "_Seen") -> Tensor:
        """Return what each upload that is finite counts, [clients]."""
        weights = weights[seen.finite.to(weights.device)].cpu()
        return weights if self.most is None else capped(weights, self.most)

    def _shares(self, weights: Tensor, seen: "_Seen", clip: float | None) -> Tensor:
        """Return how much there is of each upload in the weighted mean, [clients]."""
        shares = weights / weights.sum()
        if clip:  # a median of 0: nobody moved, and there is nothing to clip to
            shares = torch.where(seen.norms > clip, shares * (clip / seen.norms), shares)
        return shares

    def _holding(self, lost: int, clip: float | None) -> tuple[Rule, list[Mix]]:
        """Return the rule, and what is done before it, for a round in which so many of the f are known."""
        before = [dataclasses.replace(step, f=max(0, step.f - lost)) for step in self.before]
        rule = dataclasses.replace(self.robust, f=max(0, self.robust.f - lost))
        return rule, [Clip(norm=clip), *before] if clip else before


@dataclass(frozen=True)
class _Seen:
    """What is known of each of a round's uploads."""

    finite: Tensor  # [clients]
    norms: Tensor  # of those that are finite, on the CPU

    @classmethod
    def of(cls, have: Collected) -> "_Seen":
        """Return what is known of what came."""
        finite = have.finite
        return cls(finite, torch.cat(have.norms)[finite].cpu())

    def fates(self, clip: float | None, mixed: Tensor | None) -> Tensor:
        """Return what became of each upload, given the clip, and the weights of all in what is reduced.

        A rule that takes few of the uploads, as Krum takes one, says nothing against the others.
        """
        place = self.finite.cpu().nonzero().flatten()
        found = torch.full((len(self.finite),), LEFT_OUT, dtype=torch.int8)
        found[place] = 0
        if clip:
            found[place[self.norms > clip]] = CLIPPED
            found[place[self.norms >= 2 * clip]] = FAR
        used = None if mixed is None else (mixed[:, : len(place)] != 0).any(0)
        if used is not None and 2 * int(used.sum()) > len(place):
            found[place[~used]] = LEFT_OUT
        return found


@dataclass(frozen=True)
class _Sent:
    """Uploads as vectors: leaf after leaf, without those that are not finite."""

    leaves: list[list[Tensor]]  # of each leaf, the parts [clients, entries]
    centre: list[Tensor] | None  # of each leaf, [entries]
    finite: Tensor  # [clients]
    clients: int  # of those that are finite

    @classmethod
    def of(cls, parts: Sequence[Any], centre: Any = None) -> "_Sent":
        """Return the uploads, in float64 never more than some coordinates of them."""
        parts = parts[:]  # together, for what has them elsewhere
        named = [_named(part) for part in parts]
        finite = [tree.finite(one, len(part.loss)) for one, part in zip(named, parts, strict=True)]
        good = all(bool(each.all()) for each in finite)
        leaves = [
            [
                one[name].flatten(1) if good else one[name][mask].flatten(1)
                for one, mask in zip(named, finite, strict=True)
            ]
            for name in named[0]
        ]
        guess = None if centre is None else [leaf.flatten() for leaf in _named(centre, stacked=False).values()]
        found = torch.cat(finite)
        return cls(leaves, guess, found, int(found.sum()))

    def columns(self) -> Iterator[Tensor]:
        """Yield some coordinates of all uploads at a time, and of the centre below them.

        Each part is in the place of the one before.
        """
        some = max(1024, min(CHUNK, _ROOM // max(1, self.clients)))
        for place, pieces in enumerate(self.leaves):
            own = [] if self.centre is None else [self.centre[place].to(pieces[0].device)[None]]
            rows, entries = sum(map(len, pieces)) + len(own), pieces[0].shape[1]
            room = torch.empty(rows, min(some, entries), dtype=torch.float64, device=pieces[0].device)
            for begin in range(0, entries, some):
                part = room[:, : entries - begin]
                torch.cat([piece[:, begin : begin + some] for piece in (*pieces, *own)], out=part)
                yield part

    def shaped(self, like: Any, result: Tensor) -> Any:
        """Return a vector as an upload; its loss is 0."""
        found, begin = {"loss": torch.zeros((), dtype=torch.float64, device=result.device)}, 0
        for name, leaf in tree.flatten(like).items():
            if name != "loss":
                size = leaf[0].numel()
                found[name], begin = result[begin : begin + size].reshape(leaf.shape[1:]), begin + size
        return tree.unflatten(like, found)


def _reduced(total: Collected, like: Any) -> Reduced:
    dtypes, weights = mean_dtypes(like), torch.cat(total.weights)
    return Reduced(total, weights.sum(), len(weights), Collected((dtypes,), (), (), dtypes.loss))


def _norms(stacked: Any) -> Tensor:
    """Return the norm of each of some uploads, to the bit the same whatever it is stacked with."""
    parts = [
        torch.linalg.vector_norm(part.to(torch.float64), dim=1)
        for leaf in _named(stacked).values()
        for part in torch.split(leaf.flatten(1), _PART, dim=1)
    ]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    return norms


def _summed(parts: Sequence[Any], finite: Tensor, shares: Tensor) -> Any:
    """Return the sum of the uploads that are finite, each times its share."""
    found, begin, shared = None, 0, 0
    for part in parts:
        mask = finite[begin : begin + len(part.loss)]
        own = shares[shared : shared + int(mask.sum())]
        begin, shared = begin + len(mask), shared + len(own)
        if len(own):
            good = part if len(own) == len(mask) else tree.map(lambda leaf: leaf[mask], part)  # noqa: B023 - at once
            found = join(found, good, own.to(mask.device))
    assert found is not None
    return found.total


def _named(upload: Any, stacked: bool = True) -> dict[str, Tensor]:
    """Return the leaves of uploads but for the loss, with an axis of entries."""
    named = {name: leaf for name, leaf in tree.flatten(upload).items() if name != "loss"}
    return {name: leaf.unsqueeze(-1) if leaf.ndim == int(stacked) else leaf for name, leaf in named.items()}


def model_of(state: Any) -> Tree:
    """Return what of a server's state is one for all servers that have one model."""
    return state.own if isinstance(state, Robust) else state


def with_model(state: Any, model: Tree) -> Tree:
    """Return a server's state with another one."""
    return state._replace(own=model) if isinstance(state, Robust) else model


def made_robust(
    algorithm: Algorithm,
    *,
    rule: Rule,
    before: tuple[Mix, ...] = (),
    clip: float | RunningMedian | None = None,
    most: float | None = None,
    seed: int = 0,
) -> Algorithm:
    """Return the method with a server that takes uploads by a robust rule; as it is, if nothing is sent but losses."""
    if sends_losses_alone(algorithm):
        return algorithm
    if not uses_mean_alone(algorithm):
        raise refusal(algorithm, "robust", "another vector in its place is not what its clients believe")
    how: dict[str, Any] = {"before": before, "clip": clip, "most": most, "seed": seed}
    server = RobustServer(rule=algorithm.server, robust=rule, client=algorithm.client, **how)
    return dataclasses.replace(algorithm, server=server)
