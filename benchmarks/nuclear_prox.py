"""The server's nuclear prox: the whole decomposition against the partial one from the last round's factors.

    python benchmarks/nuclear_prox.py [--device cuda]

Matrices of ResNet-18's sizes with 60 singular values above the width, moved a little from one round to the next.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from personafl.core.prox import nuclear

WIDTH, RANK, TURNS = 0.1, 60, 7


def seconds(function: Callable[[], object], device: str) -> float:
    """Return the time of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    """Print a line per size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    generator = torch.Generator().manual_seed(0)
    print(f"{device}, {torch.get_num_threads()} thread(s)")
    print(f"{'size':>12}{'whole ms':>10}{'partial ms':>12}{'ratio':>7}{'gap':>10}")
    for size in (384, 768, 1536):
        low = torch.randn((size, RANK), generator=generator) @ torch.randn((RANK, size), generator=generator)
        before = (low / size + 0.02 / size**0.5 * torch.randn((size, size), generator=generator)).to(device)
        now = before + 1e-4 * torch.randn((size, size), generator=generator).to(device)
        near = nuclear(before, WIDTH)[1]
        calls = {"whole": lambda a=now: nuclear(a, WIDTH), "partial": lambda a=now, n=near: nuclear(a, WIDTH, n)}
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(TURNS + 1):
            for name, call in calls.items():
                taken = seconds(call, device)
                if turn:  # the first warms up
                    spent[name].append(taken)
        whole, partial = (1000 * statistics.median(spent[name]) for name in ("whole", "partial"))
        (u, v), (p, q) = calls["whole"](), calls["partial"]()
        gap = float(torch.linalg.matrix_norm(u @ v - p @ q) / torch.linalg.matrix_norm(u @ v))
        print(f"{f'{size}×{size}':>12}{whole:>10.1f}{partial:>12.1f}{whole / partial:>7.1f}{gap:>10.1e}")


if __name__ == "__main__":
    main()
