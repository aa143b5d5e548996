"""FedAlt's Table 10: what training with a personal part takes of a device's memory, against a whole personal model.

    python benchmarks/training_memory.py

The networks of the presets `fedalt/table4-*` at the paper's size, on random data of the right shape; a batch of one
sample, which is what the paper's figures come to.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from personafl.data.federated import FederatedData, Ragged, make_federated
from personafl.exports.memory import Memory, training_memory
from personafl.papers import find, presets
from personafl.runs.build import prepare

# Of a sample: its shape, and the classes or words that there are. Then Table 10 in MB: no personal part, input, output,
# adapter, a whole personal model.
COLUMNS = {
    "stackoverflow": ((20,), 10_000, (71, 67, 67, 72, 116)),
    "gldv2": ((3, 224, 224), 2_028, (186, 186, 174, 222, 263)),
    "emnist": ((1, 28, 28), 62, (142, 142, 142, 159, 232)),
}
PARTS = ("input", "output", "adapter")
META = torch.device("meta")


def samples(shape: tuple[int, ...], classes: int) -> FederatedData:
    """Return two random samples of one client."""
    rows, text = Ragged.from_lists([np.arange(2)]), len(shape) == 1
    return make_federated(
        name="random",
        x=torch.randint(classes, (2, *shape)) if text else torch.rand(2, *shape),
        y=torch.randint(classes, (2, *shape) if text else (2,)),
        classes=classes,
        train=rows,
        validation=Ragged.empty(1),
        test=rows,
        seen=np.arange(1),
        unseen=np.arange(0),
        client_names=("0",),
        label_names=(),
        vocabulary=classes if text else None,
    )


def memory(column: str, part: str) -> Memory:
    """Return what a client of FedAlt with this personal part needs."""
    shape, classes, _ = COLUMNS[column]
    (preset,) = presets(*find(f"fedalt/table4-{column}"), "paper")
    changes = ["training.batch=1", "federation.cohort=1", "pretrain.rounds=0"]
    recipe = preset.recipe(given=dict.fromkeys(preset.paper.datasets, Path()), changes=changes)
    job = prepare(recipe.for_method(f"alt-{part}", 0), data=samples(shape, classes))
    fed = job.federation
    fed.problems[0].net.to(META, fed.dtype)  # shapes are enough: nothing is computed
    data = dataclasses.replace(fed.data, x=fed.data.x.to(META), y=fed.data.y.to(META))
    return training_memory(dataclasses.replace(job, federation=dataclasses.replace(fed, data=data)))


def main() -> None:
    """Print the table: ours, and the paper's in brackets."""
    columns = {column: [memory(column, part) for part in PARTS] for column in COLUMNS}
    print(f"{'MB, ours (paper)':<26}" + "".join(f"{column:>18}" for column in columns))
    for line, name in enumerate(("no personal part", *PARTS, "a whole personal model")):
        cells = []
        for column, found in columns.items():
            ours = [found[0].none, *(one.partial for one in found), found[0].full][line] / 1e6
            cells.append(f"{ours:.0f} ({COLUMNS[column][2][line]})")
        print(f"{name:<26}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
