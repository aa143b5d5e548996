"""Who could open what a client masked: all that a device must remember of a try (`secure.graph` draws it)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Circle:
    """Who had shares of a client's seeds in a try in which it masked its vector, and how many of them open these.

    A client may mask the same vector in another try if so many of its circle, t, have signed keys for that: honest ones
    do so only if they opened nothing and never will, and of the k others and those who are corrupt, of whom there are
    2t − k − 1 at most, there are k − t + 2t − k − 1 < t. So the sum of the earlier try stays closed.
    """

    neighbours: tuple[int, ...]
    threshold: int
