"""Inference with low-rank layers (FedSLR, Table 9): the global models of runs, dense and factored, taking turns.

    python benchmarks/low_rank_inference.py RUN... [--batch 20] [--threads 1]

A run's global model is factored at its numerical rank, which is the one that FedSLR's prox gave it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from personafl.core import wire
from personafl.core.prox import as_matrix, nuclear
from personafl.models import MODELS
from personafl.models.cost import latency, multiply_adds
from personafl.models.factored import factorize
from personafl.recipe.recipe import Recipe
from personafl.recipe.values import read_toml


def factored(weight: torch.Tensor) -> torch.Tensor | wire.Factored:
    """Return the factors of a weight, if it has a matrix form of low rank."""
    if weight.ndim < 2:
        return weight
    largest = torch.linalg.matrix_norm(as_matrix(weight), ord=2)
    return wire.Factored.of(weight, *nuclear(as_matrix(weight), 1e-5 * float(largest)))


def main() -> None:
    """Print a line per run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--input", type=int, nargs="+", default=[3, 32, 32])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    x = torch.randn(options.batch, *options.input)
    print(f"batch {options.batch}, {options.threads} thread(s)")
    print(f"{'run':<24}{'parameters':>12}{'multiply-adds':>15}{'dense ms':>10}{'factored ms':>13}{'ratio':>7}")
    for run in options.runs:
        recipe = Recipe.parse(read_toml(run / "recipe.toml"))
        weights = wire.decode_named((run / "global.safetensors").read_bytes())
        make, given = MODELS[recipe.model.name], {"input_shape": options.input, **(recipe.model.model_extra or {})}
        last = list(make(classes=2, **given).state_dict())[-1]  # the output layer's bias
        module = make(classes=len(weights[last]), **given)
        module.load_state_dict(weights)
        forms = {name: factored(value) for name, value in weights.items()}
        small = factorize(module, forms, x[:1])
        torch.testing.assert_close(small(x), module(x), rtol=1e-3, atol=1e-3)
        ms = latency({"dense": module.eval(), "factored": small.eval()}, x)
        count, cost = wire.parameters(forms), multiply_adds(small, x[:1])
        times = f"{ms['dense']:>10.1f}{ms['factored']:>13.1f}{ms['factored'] / ms['dense']:>7.2f}"
        print(f"{run.name:<24}{count:>12,}{cost:>15,}{times}", flush=True)


if __name__ == "__main__":
    main()
