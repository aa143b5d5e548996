"""The sections [cloud] and [buffer] of a recipe: several servers, or one that does not wait, and who waits for whom."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from personafl.errors import BadInput
from personafl.latency.laws import Exponential, Latency, Trace
from personafl.options import Positive, Strict

Matrix = tuple[tuple[float, ...], ...]  # row n: how much of each server's model is in server n's
ARRIVAL, STEP = Exponential(mean=2.0), Exponential(mean=1.0)  # as in the paper's §5.2


class TimesSection(Strict):
    """How long devices take, in a section with more."""

    arrival: Latency = ARRIVAL  # until a device asks to take part
    step: Latency = STEP  # of one local step, or of an epoch where training is in epochs

    def read_traces(self) -> None:
        """Fail now if a trace cannot be read."""
        for latency in (self.arrival, self.step):
            latency.quantile(0.5)

    def anchored(self) -> Self:
        """Return it with whole paths of traces."""
        return self.model_copy(update={name: _anchored(getattr(self, name)) for name in ("arrival", "step")})


def _anchored(latency: Any) -> Any:
    file = latency.file if isinstance(latency, Trace) else None
    return latency.model_copy(update={"file": str(Path(file).expanduser().resolve())}) if file else latency


class DelaySection(Strict):
    """How long some devices take, where that is not as the others; what is left out is as the others'."""

    servers: tuple[Annotated[int, Field(ge=0)], ...] = ()  # all devices of these servers
    devices: tuple[str, ...] = ()  # and these, by name
    arrival: Latency | None = None
    step: Latency | None = None


class CloudSection(TimesSection):
    """Which servers there are, how they work together, and how long devices take."""

    servers: Positive
    protocol: Literal["sync", "async", "rigorous", "gossip"] = "sync"
    first: Positive | None = None  # B: how many servers an asynchronous round waits for
    active: Positive | None = None  # devices per server and round: the first to ask; None: all
    members: tuple[tuple[str, ...], ...] | None = None  # names of each server's clients; None: dealt evenly
    mixing: Literal["full", "ring"] | Matrix | tuple[Matrix, ...] | None = None  # for gossip; several: in turn
    iterations: Positive = 1  # K_z: mixings and steps of a server per round
    delays: tuple[DelaySection, ...] = ()  # of some servers or devices; the last that has a device counts

    def read_traces(self) -> None:
        """Fail now if a trace cannot be read."""
        super().read_traces()
        for law in (law for own in self.delays for law in (own.arrival, own.step) if law is not None):
            law.quantile(0.5)

    def anchored(self) -> Self:
        """Return it with whole paths of traces."""
        changes = [{name: _anchored(getattr(own, name)) for name in ("arrival", "step")} for own in self.delays]
        delays = [own.model_copy(update=change) for own, change in zip(self.delays, changes, strict=True)]
        return super().anchored().model_copy(update={"delays": tuple(delays)})

    @property
    def asynchronous(self) -> bool:
        """Whether a round waits only for the first servers."""
        return self.protocol in ("async", "rigorous")

    @property
    def shared(self) -> bool:
        """Whether all servers have one model."""
        return self.protocol == "sync"


def check_no_cohorts(federation: Mapping[str, Any], instead: str) -> None:
    """Fail if a recipe's section `federation` asks for cohorts; `instead` says who takes part, and the remedy."""
    everyone = isinstance(federation["cohort"], float) and federation["cohort"] == 1.0  # an integer 1 is one client
    if not everyone or federation["sampling"] != "exact":
        raise BadInput(f"federation.{'sampling' if everyone else 'cohort'}: {instead}")


class BufferSection(TimesSection):
    """How many uploads make a new version of the model, how many clients train at a time, and how long they take."""

    size: Positive  # uploads per version; 1: fully asynchronous; as many as concurrency: synchronous
    concurrency: Positive | None = None  # clients that train at a time; None: all
    max_staleness: Annotated[int, Field(ge=0)] | None = None  # older uploads are dropped; None: none are
    discount: Literal["polynomial", "none"] = "polynomial"  # a change s versions late counts 1/√(1 + s), or whole


def check_buffer(buffer: BufferSection | None, federation: Mapping[str, Any], *, on_cloud: bool) -> None:
    """Fail if values do not go together, whatever the data; `federation` is the recipe's section."""
    if buffer is None:
        return
    if on_cloud:
        raise BadInput("buffer: it is for one server, and [cloud] has several; remove one of the two sections")
    check_no_cohorts(federation, "with [buffer] who is free takes part; remove it, and set buffer.concurrency")
    if buffer.concurrency is not None:
        check_size(buffer.size, buffer.concurrency)


def check_size(size: int, concurrency: int) -> None:
    """Fail if a buffer would never be full."""
    if size > concurrency:
        raise BadInput(
            f"buffer.size: waits for {size} uploads, but only {concurrency} clients train at a time; lower it, or "
            "raise buffer.concurrency"
        )
