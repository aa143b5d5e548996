"""What a device and its server say to each other where updates are summed unseen: see `secure.messages`."""

from typing import Annotated

from pydantic import Field

from personafl.deploy.net.messages import Count, Digest, Message

Attempt = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Begin(Message):
    """Device: my update of this round waits to be summed; what became of it, or which try can it be in?

    The answer is a `Try`, or `Accepted`: it is in the sum; or `Wait`.
    """

    round: Count
    model: Digest


class Try(Message):
    """Server: take part in this try, of a cohort of `clients`; the grid is for `most`, each of at most this weight."""

    attempt: Attempt
    clients: Count
    most: Count
    weight: Annotated[float, Field(gt=0)]


class Say(Message):
    """Device: the payload is what I say in a stage of a try."""

    round: Count
    attempt: Attempt
    stage: Annotated[int, Field(ge=0, le=4)]


class Noted(Message):
    """Server: heard."""


class Follow(Message):
    """Device: what follows the stage that I spoke in? The answer is `Followed`, or `Wait`."""

    round: Count
    attempt: Attempt
    stage: Annotated[int, Field(ge=0, le=4)]


class Followed(Message):
    """Server: the payload is what a device is told after a stage."""
