"""The shape of every method: two pure rules, one per machine, joined by two typed messages.

    server.broadcast ── Down ──▶ client.update ── Up ──▶ server.update

States and messages are NamedTuples of tensors (or of dicts of tensors), so stacking, checkpoints and the wire need no
code per algorithm. Every state has one owner; only `Down` and `Up` cross.
"""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import tree, wire
from personafl.core.batches import Batches, Data, Steps
from personafl.core.losses import Loss, MeanLoss, Metric, correct, divergence
from personafl.core.net import Net
from personafl.core.reduced import Reduced as Reduced
from personafl.core.reduced import join as join
from personafl.core.reduced import mean_dtypes as mean_dtypes
from personafl.core.reduced import reduce as reduce
from personafl.core.reduced import weighted_sum as weighted_sum
from personafl.core.shape import DataShape
from personafl.core.split import Split
from personafl.core.tree import Params, Tree
from personafl.errors import BadInput

T = TypeVar("T")
Own = dict[str, Tree]  # fields of a broadcast that are of some clients alone, stacked
NOTHING_OWN: Own = {}
_UNKNOWN = DataShape(input_shape=(), classes=1)


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
    divergence: Loss = divergence  # of a pupil's outputs from a teacher's
    metrics: tuple[tuple[str, Metric], ...] = ()  # that are scored beside it, of each client
    bits: int | None = None  # of each weight of the client's own model, for methods that quantize; None: as they say
    penalty: float | None = None  # that holds the client's own model to the shared one (γ_i); None: as the method says
    rank: int | None = None  # of the client's adapters, if it is less than others'
    data: DataShape = _UNKNOWN

    @property
    def personal_net(self) -> Net:
        """The architecture of the client's own model."""
        return self.local_net or self.net

    @property
    def unstackable(self) -> str | None:
        """What of the networks cannot be run for several clients at once, if that was found."""
        return self.net.unstackable or self.personal_net.unstackable

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


class ClientRule(ABC):
    """The part that ships to the device. Pure: never changes its arguments, draws nothing at random but in `init`.

    `update` declares its messages, as in `update(self, problem, down: DOWN, state, data: Data) -> tuple[STATE, UP]`.
    A rule has the four abstract members. All others have defaults; whoever overrides one can do more.
    """

    uploads_of_state: ClassVar[tuple[str, ...]] = ()  # fields of the upload that may equal a part of the state
    # Whether gradients of minibatches, each taken once, are all that sees samples; of the rest, at most their number.
    by_gradients: ClassVar[bool] = False
    kept_phases: ClassVar[tuple[str, ...]] = ()  # phases of which nothing is ever sent, not in a later round either

    @property
    @abstractmethod
    def phases(self) -> Mapping[str, Steps]:
        """Data budget of each named phase of `update`."""

    @abstractmethod
    def init(self, problem: Problem, down: Any, generator: torch.Generator) -> Tree:
        """Return the state of a client that takes part for the first time. It stays on the device."""

    @abstractmethod
    def update(self, problem: Problem, down: Any, state: Any, data: Data) -> tuple[Tree, Tree]:
        """Train for one round: return the new state and what is sent up. There may be no steps, or only padding."""

    @abstractmethod
    def models(self, problem: Problem, down: Any, state: Any) -> dict[str, Params]:
        """Return the models a client can use now: "global" (in `net`) and/or "personal" (in `personal_net`)."""

    @property
    def tuning(self) -> Mapping[str, Steps]:
        """Data budget of each named phase of `personalize`; empty: the method does not fine-tune."""
        return {}

    def personalize(self, problem: Problem, down: Any, state: Any, data: Data) -> Tree:
        """Make a client without history its own model from what the server sends; nothing is sent back."""
        return state

    @property
    def offline(self) -> Callable[[Problem, Any, Data], Tree] | None:
        """`offline(problem, state, data) -> state`: training without contact, on the data of `phases`; None: it waits.

        A rule that can defines it as a method.
        """
        return None

    @property
    def introduce(self) -> Callable[[Problem, Any], Tree] | None:
        """`introduce(problem, state) -> UP`: what a server must know of a client of another one; None: nothing.

        A rule whose server has `admit` defines it as a method.
        """
        return None

    @property
    def packed(self) -> Callable[[Problem, Any, Any], dict[str, tuple[Tree, ...]]] | None:
        """`packed(problem, message, state)`: the models in a more compact form than dense; None: there is none.

        Each is in parts, with leaves in wire forms, whose sum is the model. `message` has its compact forms. A rule
        that knows such a form defines this as a method.
        """
        return None

    def bits_of(self, problem: Problem) -> int | None:
        """Return the bits of each quantized weight of a client's own model; None: all are whole."""
        return problem.bits

    def expects(self, problem: Problem, start: Params) -> Tree:
        """Return what a newcomer is sent before the first round, for its structure: `start` is the shared model then.

        Here every field of the message that `update` declares is like the whole model.
        """
        message = _message(typing.get_type_hints(type(self).update).get("down"), self)
        return message(*(start for _ in message._fields))

    @property
    def uploads(self) -> type[Any]:
        """The type of what leaves the device, as `update` declares it: what may leave is listed, never guessed."""
        returned = typing.get_args(typing.get_type_hints(type(self).update).get("return"))
        return _message(returned[1] if len(returned) == 2 else None, self)


def only_by_gradients(rule: ClientRule) -> bool:
    """Say whether a rule declares `by_gradients` of its own `update` and `personalize`, not of those of a base."""
    kinds = type(rule).__mro__
    said, *whose = (
        next(at for at, kind in enumerate(kinds) if name in vars(kind))
        for name in ("by_gradients", "update", "personalize")
    )
    return rule.by_gradients and said <= min(whose)


def _message(declared: Any, rule: ClientRule) -> type[Any]:
    if not (isinstance(declared, type) and issubclass(declared, tuple) and "_fields" in vars(declared)):
        raise BadInput(
            f"method: {type(rule).__name__}.update does not declare its messages; annotate it as (self, problem, down: "
            "DOWN, state, data) -> tuple[STATE, UP], DOWN and UP NamedTuples"
        )
    return declared


class ServerRule(ABC):
    """The part that runs on the server.

    Where there are several servers, each has a state, and the fields of a state that its type does not mark with
    `own_fields` are mixed: replaced by a mean over servers. A state that was mixed is then stepped, by `update` or,
    without uploads, by `again`.
    """

    # Whether uploads are changes of what was sent, of which the mean alone is used: late ones may count less, or 0.
    averages: ClassVar[bool] = False
    needs_each: ClassVar[bool] = False  # whether `join` looks at single uploads: else they may be summed before
    collect: ClassVar[Callable[..., Reduced] | None] = None  # `join` of all, [1, …] each, that can be looked at again
    steps_alone: ClassVar[bool] = False  # whether a round without uploads is a step all the same

    @abstractmethod
    def init(self, problem: Problem, start: Params, population: float) -> Tree:
        """Return the state before the first round.

        `population` is the weight of everyone who may take part, all together: their number where uploads count alike,
        their samples where uploads are weighted by those. So `uploads.weight / population` is the cohort's share.
        """

    @abstractmethod
    def broadcast(self, state: Any) -> Tree:
        """Return what every client of the next round receives; leaves may be wire forms (`core.wire`).

        Fields that the message's type marks with `sent_once` are for `init` alone.
        """

    @abstractmethod
    def update(self, state: Any, uploads: Reduced, round_: int) -> Tree:
        """Return the state after a round."""

    @property
    def address(self) -> Callable[[Any, NDArray[Any]], Own] | None:
        """`address(state, clients)`: what some clients are sent of their own; None: all are sent the same.

        Those are fields of the broadcast, stacked: leaves are plain tensors [clients, …], in place of the broadcast's
        own, of one shape and type with them. It is the same for each client whoever else is asked for. Who may not
        take part is sent the broadcast as it is: what it has in these fields is for nobody in particular. A rule that
        can defines it as a method.
        """
        return None

    def join(self, state: Any, joined: Reduced | None, stacked: Tree, weights: Tensor) -> Reduced:
        """Return what is joined so far with the uploads of some clients, stacked, as `update` is given them."""
        return join(joined, stacked, weights)

    @property
    def join_from(self) -> Callable[[Any, Reduced | None, Any, Tensor, NDArray[Any], int], Reduced] | None:
        """`join_from(state, joined, stacked, weights, clients, round)`: `join` that is told whose; None: it need not.

        `state` is what the broadcast was made from. A rule with `needs_each` defines it whose clients change uploads
        before they are summed, each in its own way, or whose state has something of each client. What it makes need
        not be a sum, if `update` takes it: uploads come one chunk after the other, in any order.
        """
        return None

    def weigh(self, problem: Problem, weights: NDArray[Any]) -> NDArray[Any]:
        """Return how much the uploads of clients with this problem count, given the recipe's weights, [clients]."""
        return weights

    def told(self, state: Any) -> dict[str, float]:
        """Return what the record of a round has of the state after it, by name."""
        return {}

    @property
    def again(self) -> Callable[[Any], Tree] | None:
        """`again(state) -> state`: one more step without uploads; None: there is none. A rule that can defines it."""
        return None

    @property
    def admit(self) -> Callable[[Any, float, Any], Tree] | None:
        """`admit(state, weight, up) -> state`: take in a client of another server; None: a state has nothing of each.

        `up` is how it introduces itself; None: it has not taken part yet. A rule whose state has something of every
        client defines it, or its clients stay with their servers.
        """
        return None


@dataclass(frozen=True)
class Algorithm:
    """A method: its name and its two rules, whose fields are its hyperparameters.

    `personal` is the part of the network that is personal where a recipe does not say (see `models.parts`). Whoever
    sets `own_networks`, `uses_bits` or `most_penalty` keeps to the problem's `personal_net`, `bits` or `penalty`;
    recipes that ask others for that are refused. Whoever sets `head` has a `personal_net` with it in every problem.
    """

    name: str
    client: ClientRule
    server: ServerRule
    personal: str | None = None
    head: str | None = None  # of `core.heads`, that a client's own network has in place of the personal linear layer
    own_networks: bool = False  # a client's model may be of another architecture than the shared one
    uses_bits: bool = False  # a client's model may have fewer bits per weight
    most_penalty: float | None = None  # a client may have a penalty of its own, at most this large; None: it may not


def packed(rule: ClientRule, problem: Problem, message: Any, state: Any) -> dict[str, tuple[Tree, ...]]:
    """Return a client's models as a device stores them: parts with leaves in wire forms, whose sum is the model.

    `message` is the broadcast with its compact forms.
    """
    if rule.packed is not None:
        return rule.packed(problem, message, state)
    return {name: (params,) for name, params in rule.models(problem, wire.dense(message), state).items()}


def no_steps(problem: Problem, phases: Mapping[str, Steps], like: Tensor) -> Data:
    """Return data of which no step is made, for whoever asks what structure a rule's results have."""
    shape, device = problem.data, like.device
    x = torch.zeros(1, *shape.input_shape, dtype=like.dtype if shape.vocabulary is None else torch.int64, device=device)
    y = torch.zeros(1, *shape.target_shape, dtype=torch.int64 if shape.whole else like.dtype, device=device)
    rows = torch.zeros((0, 1), dtype=torch.int64, device=device)
    batches = Batches(x, y, rows, rows.bool(), rows[:, 0])
    return Data(dict.fromkeys(phases, batches), torch.ones((), device=device), torch.zeros((), device=device))


def untrained_upload(rule: ClientRule, problem: Problem, down: Any, state: Tree) -> Tree:
    """Return what a client sends that has trained no steps, for its structure."""
    like = next((leaf for leaf in tree.leaves((down, state)) if leaf.is_floating_point()), torch.zeros(()))
    state = tree.map(lambda leaf: leaf.to(like) if leaf.is_floating_point() else leaf.to(like.device), state)
    upload: Any = rule.update(problem, for_returning(down), state, no_steps(problem, rule.phases, like))[1]
    return upload._replace(loss=upload.loss.to(like))  # the mean of no losses has no type of its own


_SENT_ONCE: dict[type[Any], tuple[str, ...]] = {}
_OWN_FIELDS: dict[type[Any], tuple[str, ...]] = {}


def sent_once(*fields: str) -> Callable[[type[T]], type[T]]:
    """Mark fields of a broadcast's type that only `init` needs: a client that has a state is not sent them again."""
    return _marking(_SENT_ONCE, fields)


def for_returning(message: T) -> T:
    """Return a broadcast without what is sent only once."""
    once = _SENT_ONCE.get(type(message))
    return message._replace(**{name: {} for name in once}) if once else message  # type: ignore[attr-defined]


def given(message: T, own: Own) -> T:
    """Return a broadcast with the fields that are one client's own."""
    return message._replace(**own) if own else message  # type: ignore[attr-defined]


def own_fields(*fields: str) -> Callable[[type[T]], type[T]]:
    """Mark fields of a server state's type that are a server's own: they are not mixed with those of other servers."""
    return _marking(_OWN_FIELDS, fields)


def fields_of_its_own(state: type[Any]) -> tuple[str, ...]:
    """Return the fields of a server state's type that are marked as a server's own."""
    return _OWN_FIELDS.get(state, ())


def _marking(marks: dict[type[Any], tuple[str, ...]], fields: tuple[str, ...]) -> Callable[[type[T]], type[T]]:
    def mark(marked: type[T]) -> type[T]:
        marks[marked] = fields
        return marked

    return mark
