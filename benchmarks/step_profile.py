"""Where a round of ours goes on one core, beside what the core can do: for the workloads of peers.py.

    OMP_NUM_THREADS=1 python benchmarks/step_profile.py mlp [fedavg]

Prints the time of a round, the operations that take most of it, the rate of one large product, and for the MLP how many
client steps a loop of the same products does that is written by hand, without autograd or framework.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from with_personafl import Personafl
from work import WORKS

from personafl.simulate.engine import steps_of


def best(work: Callable[[], object], times: int = 8) -> float:
    """Return the least seconds of several, after one to warm up."""
    work()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def large_product(size: int = 1024) -> float:
    """Return the Gflop/s of one."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / best(lambda: a @ b) / 1e9


def by_hand(clients: int = 10, batch: int = 32, steps: int = 100) -> float:
    """Return the client steps a second of the MLP's products and updates, stacked."""
    pool, rows = torch.randn(6400, 784), torch.randint(0, 6400, (steps, clients * batch))
    w, v = 0.01 * torch.randn(clients, 200, 784), 0.01 * torch.randn(clients, 10, 200)
    b, c = torch.zeros(clients, 200), torch.zeros(clients, 10)
    targets = torch.randint(0, 10, (clients, batch, 1))

    def train() -> None:
        for step in range(steps):
            x = pool.index_select(0, rows[step]).view(clients, batch, 784)
            h = torch.baddbmm(b[:, None], x, w.mT)
            hidden = torch.relu(h)
            g = torch.softmax(torch.baddbmm(c[:, None], hidden, v.mT), -1)
            g = g.scatter_add(2, targets, torch.full(targets.shape, -1.0)) / batch
            back = torch.where(h > 0, torch.bmm(g, v), 0.0)
            torch.baddbmm(v, g.mT, hidden, alpha=-0.05, out=v)
            torch.baddbmm(w, back.mT, x, alpha=-0.05, out=w)
            c.sub_(g.sum(1), alpha=0.05)
            b.sub_(back.sum(1), alpha=0.05)

    return steps * clients / best(train, 3)


def main(work: str, method: str = "fedavg") -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    side = Personafl(WORKS[work], method)
    simulation, seconds = side.simulation, best(side.round)
    data, rule = simulation.federation.data, simulation.federation.algorithm.client
    steps = steps_of(data, data.seen, rule.phases, 0, 0).sum()
    print(f"{work}, {method}: {1e3 * seconds:.1f} ms a round of {WORKS[work].clients} clients")
    print(f"{steps / seconds:.0f} client steps a second")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        side.round()
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=40))
    print(f"one large product: {large_product():.0f} Gflop/s")
    if work == "mlp":
        print(f"by hand: {by_hand():.0f} client steps a second")


if __name__ == "__main__":
    main(*sys.argv[1:])
