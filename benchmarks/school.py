"""School as in Liu et al. (NeurIPS 2022): make the data that recipes/private-school.toml is for, and its table.

    python benchmarks/school.py data school.npz data/
    for s in 0 1 2 3 4; do
        personafl compare recipes/private-school.toml --dataset data/school-$s.npz --seeds $s --out runs/school-$s
    done
    python benchmarks/school.py table runs/school-*

A fifth of each school's pupils are for testing, others with each seed. Features are standardised in each school by its
training pupils; that is not covered by [sample_privacy], nor in the paper. The table has the mean squared error of test
pupils, of scores scaled to [0, 1], over all pupils: mean and standard deviation over seeds.
"""

import csv
import sys
from pathlib import Path

import numpy as np

PAPER = {"fedavg": 0.0256, "local": 0.0263, "mrmtl": 0.0239}


def dealt(features: np.ndarray, school: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features that training pupils of each school have with mean 0 and deviation 1, and who is for testing.

    Those that are constant among them are left in their units.
    """
    generator = np.random.default_rng(seed)
    found, test = np.empty(features.shape, dtype=np.float32), np.zeros(len(school), dtype=np.uint8)
    for one in np.unique(school):
        pupils = generator.permutation(np.flatnonzero(school == one))
        held, rest = np.split(pupils, [-(-len(pupils) // 5)])
        own = features[rest].astype(np.float64)
        spread = own.std(0)
        found[pupils] = (features[pupils] - own.mean(0)) / np.where(spread > 0, spread, 1)
        test[held] = 1
    return found, test


def error(run: Path) -> tuple[float, float]:
    """Return the mean squared error of a run's test pupils, and the largest epsilon."""
    with (run / "clients.csv").open() as file:
        lines = list(csv.DictReader(file))
    model = "personal" if "personal_test_loss" in lines[0] else "global"
    samples = np.array([int(line["test"]) for line in lines])
    losses = np.array([float(line[f"{model}_test_loss"]) for line in lines])
    return 8 * float(losses @ samples / samples.sum()), max(float(line["sample_epsilon"]) for line in lines)


def main() -> None:
    """Do what the command line says."""
    what, *paths = sys.argv[1:]
    if what == "data":
        given, folder = np.load(paths[0]), Path(paths[1])
        folder.mkdir(parents=True, exist_ok=True)
        for seed in range(5):
            features, test = dealt(given["features"], given["user"], seed)
            arrays = {"features": features, "targets": given["targets"], "user": given["user"], "split": test}
            np.savez_compressed(folder / f"school-{seed}.npz", **arrays)
        return
    for method, paper in PAPER.items():
        runs = [
            error(run)
            for folder in map(Path, paths)
            for run in folder.glob(f"{method}*")
            if (run / "clients.csv").exists()
        ]
        errors = np.array([each for each, _ in runs])
        away = 100 * (errors.mean() / paper - 1)
        print(
            f"{method:8} {errors.mean():.5f} ± {errors.std(ddof=1):.5f}, paper {paper} ({away:+.1f} %), "
            f"{len(runs)} seeds, epsilon {max(spent for _, spent in runs):.3f} at most"
        )


if __name__ == "__main__":
    main()
