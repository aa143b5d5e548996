"""Memory of FedSLR's server against the number of clients, which it should not depend on (Algorithm 3).

    python benchmarks/server_memory.py

Each line is a process of its own: a server with a network of 1.05 million parameters takes a round's uploads one by
one, from ever more clients, and steps. For comparison: what tracking a dual per client (Algorithm 1) would take.
"""

from __future__ import annotations

import subprocess
import sys

import torch

from personafl.algorithms.averaging import Change
from personafl.algorithms.fedslr import SlrServer
from personafl.core import tree
from personafl.core.algorithm import reduce
from personafl.system import peak_memory

SHAPES = {"hidden.weight": (1024, 512), "hidden.bias": (1024,), "output.weight": (512, 1024), "output.bias": (512,)}


def measure(clients: int) -> None:
    """Run a round of so many clients and print the peak memory."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    start = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    server = SlrServer()
    state = server.init(None, start, float(clients))  # type: ignore[arg-type]
    change = {name: 1e-3 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    joined = None
    for client in range(clients):
        upload = Change(tree.scale(change, 1 + client / clients), torch.tensor(1.0))
        part = reduce(tree.stack([upload]), torch.ones(1))
        joined = part if joined is None else joined.plus(part)
    assert joined is not None
    state = server.update(state, joined, 0)
    kept = sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(state))
    tracked = clients * 4 * sum(leaf.numel() for leaf in start.values()) / 2**20
    print(f"{clients:>8}{kept / 2**20:>14.2f}{peak_memory():>13.0f}{tracked:>24,.0f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]))
    else:
        print(" clients   state (MiB)   peak (MiB)   a dual per client (MiB)")
        for count in (100, 1_000, 10_000):
            subprocess.run([sys.executable, __file__, str(count)], check=True)
