"""What a display is told while a run is on."""

from collections.abc import Callable
from dataclasses import dataclass

from personafl.simulate.simulator import Round


@dataclass(frozen=True)
class Progress:
    """What a display is told after each round."""

    round: Round
    rounds: int
    accuracy: float | None  # of the last scoring: personal if the method has one, else global
    seconds: float  # of training in this process
    done: int  # rounds done in this process


@dataclass(frozen=True)
class Tuning:
    """What a display is told while clients are fine-tuned."""

    done: int
    clients: int


@dataclass(frozen=True)
class Trials:
    """What a display is told while a method's options are tuned."""

    done: int
    trials: int
    rounds: int  # up to which they go on


@dataclass(frozen=True)
class Note:
    """A line that a display prints; of what several runs share once."""

    text: str
    shared: bool = False


Event = Progress | Tuning | Trials | Note
Listener = Callable[[Event], None]
