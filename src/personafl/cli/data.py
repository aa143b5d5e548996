"""The commands about data: describe them, and deal them to devices."""

from pathlib import Path
from typing import Annotated

import typer

from personafl.cli.console import err, out, say
from personafl.cli.options import Dataset, Label, PartitionText, TextColumn, User, Words, parsed


def describe(
    words: Words = None,
    dataset: Dataset = None,
    label: Label = None,
    text: TextColumn = None,
    user: User = None,
    partition: PartitionText = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the split.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also draw clients × classes here.")] = None,
) -> None:
    """Print and draw how clients share a dataset."""
    from personafl.data.build import load
    from personafl.data.describe import describe as print_shares
    from personafl.report.split import write_split

    recipe = parsed(words, dataset, label, user, partition, also={"seed": seed, "data.text": text})
    data = load(recipe.data, recipe.seed)
    print_shares(data, out, recipe.data)
    if svg is not None:
        write_split(data, svg)
        err.print(f"picture: {svg}")


def deal(
    words: Words = None,
    dataset: Dataset = None,
    label: Label = None,
    text: TextColumn = None,
    user: User = None,
    partition: PartitionText = None,
    out_path: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to.")] = Path("dealt"),
) -> None:
    """Write each client's data to a file of its own, for devices, and the recipe that their server needs."""
    from personafl.deploy.device.dealing import deal as write

    recipe = parsed(words, dataset, label, user, partition, also={"data.text": text})
    _, files = write(recipe, out_path)
    say(f"{len(files)} files and recipe.toml in {out_path}")
