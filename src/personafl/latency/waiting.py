"""How many servers to wait for: what each choice of B costs in time, and a proposal for β = B/N."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from personafl.core.rng import uniforms
from personafl.errors import BadInput
from personafl.latency.laws import Exponential, Law, Pareto, Trace, Weibull, parse_latency
from personafl.latency.order import Counts, expected_times, large_n_bound, simulated_ratios, weibull_bound
from personafl.latency.samples import Sample

MOST_SERVERS = 1000
MOST_CHOICES = 20  # of B, evenly spaced
NEARLY = 0.95  # of the best agreement: as good, given what the criterion leaves out
REPLICAS = 32  # clouds simulated side by side
ALONE = "1: nothing is mixed, so that each server learns from its own devices alone; wait for 2 at least"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What waiting for the first B of N servers means. Times in seconds; those of sync are those of B = N.

    `seconds` and the ratios to sync (r = E[τ_(B)]/E[τ_(N)]) take it that every server starts afresh after each mix, as
    the paper's analysis does. `pace` is what the protocol does: the servers that are not waited for keep the time they
    have worked. It is the time between two mixes, in units of sync's.
    """

    first: int
    share: float  # β
    seconds: float  # E[τ_(B)] by the formula
    ratio: float  # by the formula
    simulated: float
    simulated_error: float  # standard error
    bound: float | None  # for large N, from above
    weibull: float | None  # the bound's closed form, where the law is Weibull
    pace: float
    pace_error: float  # standard error
    rigorous: float  # the same where late servers update alone and go on, so that every server does every round
    rigorous_error: float  # standard error
    work: float  # servers' rounds mixed in per second, in units of sync's
    agreement: float  # (B−1)/(N−1) per pace: how fast servers' models come together, in units of sync's


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The choices of B for N servers, the one proposed, and those that are about as good."""

    servers: int
    choices: tuple[Choice, ...]
    proposed: Choice
    near: tuple[float, float]  # β of the first and last choice within 5 % of the proposed one
    notes: tuple[str, ...]

    def only(self, first: int | None) -> Waiting:
        """Return it with one choice alone; with all, if none is named."""
        return replace(self, choices=tuple(choice for choice in self.choices if first in (None, choice.first)))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def analyse(law: Law | Sample, servers: int, *, first: int | None = None, seed: int = 0) -> Waiting:
    """Work out all choices of B (evenly spaced ones and `first`, where there are more than twenty), and propose one.

    Proposed is the B with the most agreement per time, (B−1)/T_B, where T_B is the time between two mixes with kept
    work. The reason: mixing a random B of N models removes the share (B−1)/(N−1) of their variance. If every server's
    round adds the same variance, what stays is in proportion to B/(B−1), and the work done per time, B/T_B, is
    discounted by it. Work alone would propose B = 1, which mixes nothing.

    What it leaves out: that a round on an older model is worth less, how much the data of servers differ, that servers
    which begin together tend to meet again, and that the data of one which is always slow come in less often.
    """
    if not 1 <= servers <= MOST_SERVERS:
        raise BadInput(f"servers {servers}: must be from 1 to {MOST_SERVERS}")
    if first is not None and not 1 <= first <= servers:
        raise BadInput(f"first {first}: must be from 1 to the number of servers, {servers}")
    if law.mean == 0:
        raise BadInput("latency: all times are 0, so no server is waited for; give times above 0")
    spaced = np.linspace(1, servers, min(servers, MOST_CHOICES)).round()
    choices = _choices(law, servers, np.union1d(spaced, [first or servers]).astype(np.int64), seed)
    best = max(choices, key=lambda choice: (choice.agreement, choice.first))
    near = [choice.share for choice in choices if choice.agreement >= NEARLY * best.agreement]
    return Waiting(
        servers=servers,
        choices=choices,
        proposed=best,
        near=(near[0], near[-1]),
        notes=_notes(law, servers, choices, first),
    )


def _choices(law: Law | Sample, servers: int, first: Counts, seed: int) -> tuple[Choice, ...]:
    seconds = expected_times(law, servers, first)
    simulated, error = simulated_ratios(law, servers, first, seed)
    bound = large_n_bound(law, servers, first)
    shape = law.shape if isinstance(law, Weibull) else 1.0 if isinstance(law, Exponential) else None
    closed = np.full(len(first), np.nan) if shape is None else weibull_bound(shape, servers, first)
    sync = seconds[-1]
    kept, kept_error = np.array([kept_pace(law, servers, int(b), seed) for b in first]).T / sync
    alone, alone_error = np.array([rigorous_pace(law, servers, int(b), seed) for b in first]).T / sync
    mixed = (first - 1) / (servers - 1) if servers > 1 else np.ones(1)
    return tuple(
        Choice(
            first=int(b),
            share=int(b) / servers,
            seconds=float(seconds[i]),
            ratio=float(seconds[i] / sync),
            simulated=float(simulated[i]),
            simulated_error=float(error[i]),
            bound=_known(bound[i]),
            weibull=_known(closed[i]),
            pace=float(kept[i]),
            pace_error=float(kept_error[i]),
            rigorous=float(alone[i]),
            rigorous_error=float(alone_error[i]),
            work=float(b / servers / kept[i]),
            agreement=float(mixed[i] / kept[i]),
        )
        for i, b in enumerate(first)
    )


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def kept_pace(law: Law | Sample, servers: int, first: int, seed: int = 0) -> tuple[float, float]:
    """Return the mean time between two mixes of the first B servers, where the others keep their work; its error.

    For B = 1 nobody waits, and for B = N nothing is kept: both are known. Else a long-run mean over simulated clouds:
    at a mix, the B servers with the earliest `ready` begin anew, and the `ready` of the others stays as it is.
    """
    if first == 1:
        return law.mean / servers, 0.0
    if first == servers:
        return float(expected_times(law, servers, np.array([servers]))[0]), 0.0
    rounds = max(50, 2000 // servers)  # of each server; a quarter of them passes until the beginning is forgotten
    mixes, skipped = (math.ceil(part * rounds * servers / first) for part in (1.0, 0.25))
    ready = law.quantile(uniforms(seed, "kept start", first, np.arange(REPLICAS * servers))).reshape(REPLICAS, servers)
    draws = law.quantile(uniforms(seed, "kept", first, np.arange(mixes * REPLICAS * first)))
    began = np.zeros((REPLICAS, 1))
    for number, times in enumerate(draws.reshape(mixes, REPLICAS, first)):
        members = np.argpartition(ready, first - 1, axis=1)[:, :first]
        now = np.take_along_axis(ready, members, axis=1).max(axis=1, keepdims=True)
        np.put_along_axis(ready, members, now + times, axis=1)
        began = now if number == skipped else began
    paces = (now - began) / (mixes - 1 - skipped)
    # No server does more than one round per mean time, so that this cannot be less, whatever was drawn.
    least = first * law.mean / servers
    return max(float(paces.mean()), least), float(paces.std(ddof=1) / math.sqrt(REPLICAS))


def rigorous_pace(law: Law | Sample, servers: int, first: int, seed: int = 0) -> tuple[float, float]:
    """Return the mean time between two mixes of the first B servers, where every server does every round; its error.

    R_n(t), when server n is ready with round t, is max(R_n(t−1), M(t−1)) + τ: a server waits for the mix M of its
    round, or was too late for it and has gone on alone. M(t) is the B-th of the R_n(t).
    """
    if first == 1:  # nobody waits, and the first of so many walks is no faster than any of them in the long run
        return law.mean, 0.0
    if first == servers:
        return kept_pace(law, servers, first, seed)
    rounds = max(400, 20_000 // servers)
    draws = law.quantile(uniforms(seed, "rigorous", first, np.arange(rounds * REPLICAS * servers)))
    ready, mixed, began = np.zeros((REPLICAS, servers)), np.zeros((REPLICAS, 1)), np.zeros((REPLICAS, 1))
    for number, times in enumerate(draws.reshape(rounds, REPLICAS, servers)):
        ready = np.maximum(ready, mixed) + times
        mixed = np.partition(ready, first - 1, axis=1)[:, first - 1 : first]
        began = mixed if number == rounds // 4 else began
    paces = (mixed - began) / (rounds - 1 - rounds // 4)
    return float(paces.mean()), float(paces.std(ddof=1) / math.sqrt(REPLICAS))


def _notes(law: Law | Sample, servers: int, choices: tuple[Choice, ...], first: int | None) -> tuple[str, ...]:
    alone = first == 1 < servers
    return (*_rough(law, servers, choices), *((f"B = {ALONE}",) if alone else ()))


def _rough(law: Law | Sample, servers: int, choices: tuple[Choice, ...]) -> tuple[str, ...]:
    endless = isinstance(law, Pareto) and law.shape <= 2  # its variance is infinite, so there is no standard error
    if endless or any(abs(choice.simulated - choice.ratio) > 0.05 * choice.ratio for choice in choices):
        return ("the tail is so heavy that simulated values, and with them the proposal, are rough",)
    if isinstance(law, Trace) and len(law.sample.values) < 10 * servers:
        times = len(law.sample.values)
        return (f"the trace has {times} times for {servers} servers: what it says of the slowest one is rough",)
    return ()


ARRIVAL, STEP = "exponential:mean=2", "exponential:mean=1"  # as in the paper's §5.2


def round_times(
    latency: str | None = None,
    trace: Path | None = None,
    *,
    devices: int | None = None,
    active: int | None = None,
    arrival: str | None = None,
    step: str | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> tuple[Law | Sample, str]:
    """Return the distribution that a user asked for, and in words what it is; the devices of the paper, if nothing."""
    of_devices = {"devices": devices, "active": active, "arrival": arrival, "step": step, "steps": steps}
    given = [name for name, value in {"latency": latency, "trace": trace, **of_devices}.items() if value is not None]
    if len(given) > 1 and given[0] in ("latency", "trace"):
        raise BadInput(f"--{given[0]} and --{given[1]}: each says how long a round takes; give one of them")
    if trace is not None:
        measured = Trace(file=str(trace))
        return measured, f"{len(measured.sample.values)} measured rounds in {trace}"
    if latency is not None:
        return parse_latency(latency), latency
    devices, steps = (10 if devices is None else devices), (5 if steps is None else steps)
    active = min(3, devices) if active is None else active
    arrival, step = arrival or ARRIVAL, step or STEP
    laws = parse_latency(arrival), parse_latency(step)
    times = server_times(*laws, steps=steps, devices=devices, active=active, seed=seed, rounds=400_000)
    return times, f"the {active} earliest of {devices} devices: {arrival} + 1–{steps} × {step}"


def server_times(
    arrival: Law, step: Law, *, steps: int = 5, devices: int, active: int, seed: int, rounds: int = 100_000
) -> Sample:
    """Return simulated times of a server: the last of its `active` earliest devices (§5.2, footnote 2).

    A device takes arrival + K·step, K uniform on 1 … `steps`; the earliest are those that arrive first.
    """
    if not 1 <= active <= devices:
        raise BadInput(f"active {active}: must be from 1 to the number of devices, {devices}")
    if steps < 1:
        raise BadInput(f"steps {steps}: must be 1 or more")
    device = np.arange(devices)[None, :]
    number = np.arange(rounds)[:, None]
    arrives, works, counts = (uniforms(seed, purpose, number, device) for purpose in ("arrival", "step", "steps"))
    times = arrival.quantile(arrives) + (1 + np.floor(steps * counts)) * step.quantile(works)
    # By the share, not the time: where all arrive at once, a fair draw, as in the simulated cloud.
    earliest = np.argpartition(arrives, active - 1, axis=1)[:, :active]
    return Sample.of(np.take_along_axis(times, earliest, axis=1).max(axis=1))
