"""The command about differential privacy: privacy."""

from typing import Annotated

import typer

from personafl.cli.console import print_found, say
from personafl.cli.options import Json


def privacy(
    epsilon: Annotated[float | None, typer.Option(metavar="X", help="What each client may lose, at most.")] = None,
    delta: Annotated[float | None, typer.Option(metavar="X", help="Chance that it is more; below 1/clients.")] = None,
    noise: Annotated[
        float | None, typer.Option(metavar="X", help="Noise multiplier: its standard deviation over the clip.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", help="Rounds; with tree, those of a tree.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="X", help="Chance of a client to be in a round, if cohorts are Poisson samples."),
    ] = None,
    mechanism: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="gaussian, discrete, distributed, or tree or banded (DP-FTRL), which need no sampling."
        ),
    ] = "gaussian",
    trees: Annotated[
        int | None, typer.Option(metavar="N", help="Trees, in each of which a client takes part once; 1.")
    ] = None,
    apart: Annotated[
        int | None, typer.Option(metavar="N", help="With banded: rounds until a client may take part again.")
    ] = None,
    accountant: Annotated[str | None, typer.Option(metavar="NAME", help="pld, or rdp, which says more.")] = None,
    as_json: Json = False,
) -> None:
    """Print what rounds with noise promise to each client: give three of --epsilon, --delta, --noise, --rounds."""
    from personafl.api.commands import account_privacy

    found = account_privacy(
        epsilon=epsilon,
        delta=delta,
        noise=noise,
        rounds=rounds,
        rate=rate,
        mechanism=mechanism,
        trees=trees,
        apart=apart,
        accountant=accountant,
    )
    print_found(found.to_json(), (), as_json)
    if not as_json:
        for line in (found.promise, found.assumption, found.method):
            say(line)
