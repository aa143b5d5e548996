"""What secure aggregation costs and gives: clients of a million parameters, some of whom drop out after masking.

    python benchmarks/secure_sum.py [--clients 100] [--dropped 30] [--corrupt 10] [--parameters 1000000] [--range 0.3]

Prints whether the sum of the survivors is exact, the error of their mean, bytes of a client up and down, and processor
seconds of a client (all its steps) and of the server. Clients are certified by an authority made for it.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "secure"))
from people import authority, person

from personafl.secure.client import Client
from personafl.secure.fixed import Grid, unwrapped, wrapped
from personafl.secure.messages import Session
from personafl.secure.server import Aggregation, Stage


class Measured:
    """A client whose steps are timed, and whose bytes are counted."""

    def __init__(self, client: Client) -> None:
        self.client, self.seconds, self.up, self.down = client, 0.0, 0, 0

    def step(self, stage: Stage, *told: Any) -> Any:
        """Take the step of a stage."""
        begin = time.process_time()
        said = getattr(self.client, ("advertise", "share", "mask", "consent", "open")[stage])(*told)
        self.seconds += time.process_time() - begin
        self.up += len(said.encoded())
        self.down += len(told[0].encoded()) if told else 0
        return said


def values_of(number: int, given: argparse.Namespace) -> torch.Tensor:
    """Return the update of a client: uniform within the range."""
    return (torch.rand(given.parameters, generator=torch.Generator().manual_seed(number)) * 2 - 1) * given.range


def main() -> None:
    """Measure one round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--dropped", type=int, default=30, help="after their keys are shared, before their vectors")
    parser.add_argument("--corrupt", type=int, default=10)
    parser.add_argument("--parameters", type=int, default=10**6)
    parser.add_argument("--range", type=float, default=0.3, help="the largest entry")
    given = parser.parse_args()
    grid, least = Grid(given.clients, 1.0, given.range), given.clients - given.dropped
    session = Session("run", 0, "0" * 32, "0" * 64, least, given.corrupt, given.parameters, grid)
    ca, numbers = authority(), range(given.clients)
    clients = {number: Measured(Client(session, number, person(number), ca)) for number in numbers}
    server, served = Aggregation(session, numbers, ca), 0.0
    exact, reals = np.zeros(given.parameters, dtype=np.int64), torch.zeros(given.parameters, dtype=torch.float64)
    while (stage := server.stage) < Stage.DONE:
        for number in sorted(server.awaited - set(range(given.dropped) if stage is Stage.VECTORS else ())):
            told = [server.answer(number)] if stage else []
            if stage is Stage.VECTORS:
                values = values_of(number, given)
                integers = grid.integers(values[None], torch.ones(1))[0]
                exact += integers.to(torch.int64).numpy()
                reals += values.to(torch.float64)
                told.append(wrapped(integers))  # type: ignore[arg-type]
            said = clients[number].step(stage, *told)
            begin = time.process_time()
            server.hear(said)
            served += time.process_time() - begin
        begin = time.process_time()
        server.close()
        served += time.process_time() - begin
    found, left = unwrapped(server.total()), [clients[number] for number in server.survivors]
    error = float((grid.real(torch.from_numpy(found)) - reals).abs().max()) / len(left)
    times = sorted(one.seconds for one in left)
    most, whole = max(one.up for one in left), 4 * given.parameters
    print(f"{given.clients} clients, {given.dropped} dropped after masking, {given.corrupt} may be corrupt")
    print(f"neighbours and threshold: {session.degree(given.clients)}")
    print(f"the integer sum of {len(left)} is exact: {bool((found == exact).all())}")
    print(f"largest error of the mean: {error:.2e} (bound {2.0 ** -(grid.exponent + 1):.2e}, range {given.range:g})")
    print(f"upload: {most:,} bytes, {most / whole:.4f} of 4 bytes a parameter; download {max(o.down for o in left):,}")
    median = times[len(times) // 2]
    print(f"processor seconds of a client: median {median:.3f}, least {times[0]:.3f}, most {times[-1]:.3f}")
    print(f"processor seconds of the server: {served:.2f}")


if __name__ == "__main__":
    main()
