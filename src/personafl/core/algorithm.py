"""The shape of every method: two pure rules, one per machine, joined by two typed messages.

    server.broadcast ── Down ──▶ client.update ── Up ──▶ server.update

States and messages are NamedTuples of tensors (or of dicts of tensors), so stacking, checkpoints and the wire need no
code per algorithm. Every state has one owner; only `Down` and `Up` cross.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from personafl.core import tree, wire
from personafl.core.batches import Data, Steps
from personafl.core.losses import correct
from personafl.core.net import Net
from personafl.core.objective import Loss, MeanLoss
from personafl.core.split import Split
from personafl.core.tree import Params, Tree
from personafl.errors import BadInput

T = TypeVar("T")
_FEW = 32


class Empty(NamedTuple):
    """A state or message with nothing in it."""


@dataclass(frozen=True)
class Problem:
    """What a client solves: no data, no weights. Clients with equal problems are trained together.

    `net` is the architecture that everyone shares; `local_net` is the client's own where a method allows that.
    `split` says which parameters are personal, for the methods that divide one network.
    """

    net: Net
    loss: Loss
    local_net: Net | None = None
    split: Split | None = None
    correct: Loss = correct  # per sample: 1 right, 0 wrong
    edits: Loss | None = None  # [2, samples]: wrong words and words, where targets are words
    bits: int | None = None  # of each weight of the client's own model, for methods that quantize; None: as they say
    penalty: float | None = None  # that holds the client's own model to the shared one (γ_i); None: as the method says

    @property
    def personal_net(self) -> Net:
        """The architecture of the client's own model."""
        return self.local_net or self.net

    @property
    def mean_loss(self) -> MeanLoss:
        """f(w; B) of the shared architecture."""
        return MeanLoss(self.net, self.loss)

    @property
    def personal_loss(self) -> MeanLoss:
        """f(w; B) of the client's own architecture."""
        return MeanLoss(self.personal_net, self.loss)

    def mean_loss_given(self, fixed: Params) -> MeanLoss:
        """Return f as a function of one part of the parameters, the other one fixed."""
        return MeanLoss(self.net, self.loss, fixed)

    def divide(self, params: Params) -> tuple[Params, Params]:
        """Return (shared u, personal v) of the network's parameters."""
        if self.split is None:
            raise BadInput(
                "model.personal: this method divides the network; say which part is personal: "
                "input, output, body, adapter, norms, or a pattern of parameter names"
            )
        return self.split.divide(params)


class ClientRule(Protocol):
    """The part that ships to the device. Pure: never changes its arguments, draws nothing at random but in `init`.

    A rule whose clients also train without contact has a method `offline(problem, state, data) -> state`, on the data
    of `phases`; nothing is sent. One that knows a compact form of its models has `packed`.
    """

    @property
    def phases(self) -> Mapping[str, Steps]:
        """Data budget of each named phase of `update`."""

    @property
    def tuning(self) -> Mapping[str, Steps]:
        """Data budget of each named phase of `personalize`; empty: the method does not fine-tune."""

    def init(self, problem: Problem, down: Any, generator: torch.Generator) -> Tree:
        """Return the state of a client that takes part for the first time. It stays on the device."""

    def update(self, problem: Problem, down: Any, state: Any, data: Data) -> tuple[Tree, Tree]:
        """Train for one round: return the new state and what is sent up."""

    def personalize(self, problem: Problem, down: Any, state: Any, data: Data) -> Tree:
        """Make a client without history its own model from what the server sends; nothing is sent back."""

    def models(self, problem: Problem, down: Any, state: Any) -> dict[str, Params]:
        """Return the models a client can use now: "global" (in `net`) and/or "personal" (in `personal_net`)."""


class ServerRule(Protocol):
    """The part that runs on the server.

    Where there are several servers, each has a state, and the fields of a state that its type does not mark with
    `own_fields` are mixed: replaced by a mean over servers. A state that was mixed is then stepped, by `update` or,
    without uploads, by `again`. A rule that can do so has a method `again(state) -> state`.
    """

    def init(self, problem: Problem, start: Params, population: float) -> Tree:
        """Return the state before the first round.

        `population` is the weight of everyone who may take part, all together: their number where uploads count alike,
        their samples where uploads are weighted by those. So `uploads.weight / population` is the cohort's share.
        """

    def broadcast(self, state: Any) -> Tree:
        """Return what every client of the next round receives; leaves may be wire forms (`core.wire`).

        Fields that the message's type marks with `sent_once` are for `init` alone.
        """

    def update(self, state: Any, uploads: Reduced, round_: int) -> Tree:
        """Return the state after a round."""


@dataclass(frozen=True)
class Algorithm:
    """A method: its name and its two rules, whose fields are its hyperparameters.

    `personal` is the part of the network that is personal where a recipe does not say (see `models.parts`). Whoever
    sets `own_networks`, `uses_bits` or `most_penalty` keeps to the problem's `personal_net`, `bits` or `penalty`;
    recipes that ask others for that are refused. Uploads of clients with penalties of their own are weighted by those.
    """

    name: str
    client: ClientRule
    server: ServerRule
    personal: str | None = None
    own_networks: bool = False  # a client's model may be of another architecture than the shared one
    uses_bits: bool = False  # a client's model may have fewer bits per weight
    most_penalty: float | None = None  # a client may have a penalty of its own, at most this large; None: it may not


def packed(rule: ClientRule, problem: Problem, message: Any, state: Any) -> dict[str, tuple[Tree, ...]]:
    """Return a client's models as a device stores them: parts with leaves in wire forms, whose sum is the model.

    `message` is the broadcast with its compact forms. A rule that knows a more compact form than the dense models has
    a method `packed(problem, message, state)` of its own.
    """
    own = getattr(rule, "packed", None)
    if own is not None:
        return own(problem, message, state)  # type: ignore[no-any-return]
    return {name: (params,) for name, params in rule.models(problem, wire.dense(message), state).items()}


def upload_type(rule: ClientRule) -> type[Any]:
    """Return the type that a client rule declares for what leaves the device: by the annotation of its `update`.

    A rule around another one has a property `uploads` instead. One that declares nothing is refused: what may leave is
    listed, never guessed.
    """
    found = getattr(rule, "uploads", None)
    if found is None:
        returned = typing.get_args(typing.get_type_hints(type(rule).update).get("return"))
        found = returned[1] if len(returned) == 2 else None
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise BadInput(
            f"method: {type(rule).__name__}.update does not declare what it sends; annotate it as "
            "-> tuple[STATE, UP], UP a NamedTuple"
        )
    return found


def sent_once(*fields: str) -> Callable[[type[T]], type[T]]:
    """Mark fields of a broadcast's type that only `init` needs: a client that has a state is not sent them again."""

    def mark(message: type[T]) -> type[T]:
        message.SENT_ONCE = fields  # type: ignore[attr-defined]
        return message

    return mark


def for_returning(message: T) -> T:
    """Return a broadcast without what is sent only once."""
    once = getattr(type(message), "SENT_ONCE", ())
    return message._replace(**{name: {} for name in once}) if once else message  # type: ignore[attr-defined]


def own_fields(*fields: str) -> Callable[[type[T]], type[T]]:
    """Mark fields of a server state's type that are a server's own: they are not mixed with those of other servers."""

    def mark(state: type[T]) -> type[T]:
        state.OWN_FIELDS = fields  # type: ignore[attr-defined]
        return state

    return mark


class Reduced(NamedTuple):
    """Σ weightᵢ·upᵢ, Σ weightᵢ and the number of uploads: a commutative monoid, joined with `plus`.

    Sums are kept in float64, so groups, chunks and machines may join in any order without the result moving. The mean
    of a field of real numbers has its dtype; that of integers or booleans is a real number, and stays in float64.
    """

    total: Tree
    weight: Tensor
    clients: int
    dtypes: Tree  # of the mean, one for each leaf of the total

    def plus(self, other: Reduced) -> Reduced:
        """Join the uploads of two groups."""
        return Reduced(
            tree.add(self.total, other.total),
            self.weight + other.weight,
            self.clients + other.clients,
            self.dtypes,
        )

    def mean(self) -> Any:
        """Return Σ weightᵢ·upᵢ / Σ weightᵢ."""
        return tree.map(self._mean, self.total, self.dtypes)

    def loss(self) -> float:
        """Return the mean of the uploads' losses."""
        total, dtypes = self.total, self.dtypes
        return float(self._mean(total.loss, dtypes.loss))

    def _mean(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return (total / self.weight).to(dtype)


def reduce(stacked: Tree, weights: Tensor) -> Reduced:
    """Reduce stacked uploads [clients, …] by weights [clients]."""
    weights = weights.to(torch.float64)
    total = tree.map(lambda leaf: _weighted_sum(weights, leaf), stacked)
    return Reduced(total, weights.sum(), len(weights), mean_dtypes(stacked))


def mean_dtypes(uploads: Tree) -> Tree:
    """Return the dtype that the mean of each leaf has."""
    return tree.map(lambda leaf: leaf.dtype if leaf.is_floating_point() else torch.float64, uploads)


def join(joined: Reduced | None, stacked: Tree, weights: Tensor) -> Reduced:
    """Reduce stacked uploads onto what is joined so far; those of one or two clients in its memory."""
    if joined is None or weights.is_cuda or len(weights) > 2:
        part = reduce(stacked, weights)
        return part if joined is None else joined.plus(part)
    weights = weights.to(torch.float64)
    for row, weight in enumerate(weights.tolist()):
        tree.map(lambda total, leaf: total.add_(leaf[row], alpha=weight), joined.total, stacked)  # noqa: B023
    return joined._replace(weight=joined.weight + weights.sum(), clients=joined.clients + len(weights))


def _weighted_sum(weights: Tensor, stacked: Tensor) -> Tensor:
    """Return Σ_i weights_i · stacked_i in float64.

    On a GPU single precision is summed as it is for a few clients at a time: a copy in float64 takes it far longer.
    """
    few, rest = divmod(len(weights), _FEW)
    if not (stacked.is_cuda and stacked.dtype == torch.float32 and few):
        plain: Tensor = torch.tensordot(weights, stacked.to(torch.float64), dims=1)
        return plain
    whole = few * _FEW
    products = torch.backends.cuda.matmul
    rounded, products.allow_tf32 = products.allow_tf32, False
    try:
        rows = weights[:whole].to(stacked.dtype).reshape(few, 1, _FEW)
        sums = torch.bmm(rows, stacked[:whole].reshape(few, _FEW, -1))
    finally:
        products.allow_tf32 = rounded
    total = sums.sum((0, 1), dtype=torch.float64).reshape(stacked.shape[1:])
    return total + _weighted_sum(weights[whole:], stacked[whole:]) if rest else total
