"""The time of a server's round: a law, a trace, or the slowest of the devices that take part."""

from pathlib import Path

import numpy as np

from personafl.core.rng import uniforms
from personafl.errors import BadInput
from personafl.latency.laws import Law, Sample, Trace, parse_latency

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
    times = server_times(
        parse_latency(arrival), parse_latency(step), steps=steps, devices=devices, active=active, seed=seed
    )
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
