"""The options that several commands take, and the recipe that they and a command's words make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from personafl.recipe.values import from_words

if TYPE_CHECKING:
    from personafl.recipe.recipe import Recipe

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE.toml] [KEY.SUB=VALUE]...",
        help="A recipe file, and changes to it, as in training.lr=0.05. All keys: personafl recipe.",
    ),
]
Dataset = Annotated[
    str | None, typer.Option(metavar="NAME|PATH", help="digits, your file or folder, or hf:NAME (see datasets).")
]
Label = Annotated[str | None, typer.Option(metavar="COLUMN", help="Of a table: what is to be predicted.")]
TextColumn = Annotated[
    str | None,
    typer.Option("--text", metavar="COLUMN", help="Of a table: text; its next tokens are predicted, or --label."),
]
User = Annotated[str | None, typer.Option(metavar="COLUMN", help="Of a table: whose a row is.")]
PartitionText = Annotated[
    str | None,
    typer.Option(metavar="KIND", help="How clients share the data, as in dirichlet:alpha=0.1,clients=100, or users."),
]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="A name (see models) or package.module:Name.")]
Rounds = Annotated[int | None, typer.Option(metavar="N", help="Rounds of training.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="New run directory; if not given, runs/NAME-001 and up.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="No progress.")]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON and nothing else on standard output.")]


def parsed(
    words: list[str] | None,
    dataset: str | None = None,
    label: str | None = None,
    user: str | None = None,
    partition: str | None = None,
    model: str | None = None,
    rounds: int | None = None,
    *,
    also: Mapping[str, Any] | None = None,
) -> Recipe:
    """Return the recipe of a command's words, changed by its options; `also` has keys and values of further ones."""
    from personafl.data.config import parse_partition
    from personafl.recipe.recipe import Recipe

    options = {
        "data.source": dataset,
        "data.label": label,
        "data.user": user,
        "data.partition": None if partition is None else parse_partition(partition),
        "model.name": model,
        "rounds": rounds,
    }
    return Recipe.parse(*from_words(words, options | dict(also or {})))


def listed(text: str | None) -> list[str] | None:
    """Return the parts between commas."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]
