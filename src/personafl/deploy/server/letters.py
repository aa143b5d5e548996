"""A broadcast in bytes, as devices are sent it: one for all, or to each its own."""

import numpy as np

from personafl.core import tree
from personafl.core.algorithm import for_returning, given
from personafl.core.tree import Tree
from personafl.core.wire import encode
from personafl.deploy.net.messages import Payload, digest_of
from personafl.simulate.serverside import ServerSide


class Letters:
    """What a server's state has it send, until the next one: bytes are made once for all, or anew for each device."""

    def __init__(self, side: ServerSide) -> None:
        self._side, self.message = side, side.broadcast()  # what who is nobody in particular is sent
        self._each = side.rule.address is not None
        self._digests: dict[int, str] = {}  # of what is each device's own
        self.whole = Payload(encode(self.message))
        self._again = Payload(encode(for_returning(self.message)))
        self.digest = digest_of(self.whole)

    def to(self, number: int, returning: bool = False) -> bytes:
        """Return what a device is sent: whole, or without what it was sent before."""
        if not self._each:
            return self._again if returning else self.whole
        message = self._message_to(number)
        return Payload(encode(for_returning(message) if returning else message))

    def digest_to(self, number: int) -> str:
        """Return what names a device's message, whether or not it is returning."""
        if not self._each:
            return self.digest
        if number not in self._digests:
            self._digests[number] = digest_of(self.to(number))
        return self._digests[number]

    def _message_to(self, number: int) -> Tree:
        own = self._side.addressed(np.array([number]))
        return given(self.message, tree.take(own, 0))
