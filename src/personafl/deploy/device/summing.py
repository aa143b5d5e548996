"""How a device's update gets into a sum that is all its server sees: the stages of `secure.client`, over the network.

Every try has keys of its own, which are in memory alone and for one vector: a device that is killed has dropped out of
the try, and may be in the next. Once it has opened seeds of a try, which it notes before, its update is masked for no
other one: two sums with and without it would show it. Nor is it masked once more while others might open an earlier
try: before it makes keys, and before it sends what it masked, it notes that (`tries`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from personafl.deploy.device.training import LocalClient
from personafl.deploy.device.tries import Tries
from personafl.deploy.net import messages
from personafl.deploy.net.identity import Files, number_of
from personafl.deploy.net.messages import Code, Refused, Said
from personafl.deploy.net.stages import Begin, Follow, Followed, Noted, Say, Try
from personafl.deploy.net.transport import Channel
from personafl.errors import BadInput
from personafl.secure.client import Client
from personafl.secure.credentials import Authority, Credentials
from personafl.secure.faults import Breach, Fault
from personafl.secure.fixed import Grid, Vector
from personafl.secure.messages import Consents, Inbox, Roster, Session, Survivors, decoded
from personafl.secure.uploads import length_of, vector_of

M = TypeVar("M")
Patiently = Callable[[Callable[[], Any], Callable[[], Any]], Awaitable[Any]]
_SMALL = 2**12  # bytes that a device is told in a stage, for each of the cohort, at most


class Summing:
    """A device's part in the sums of a run."""

    def __init__(
        self,
        client: LocalClient,
        channel: Channel,
        files: Files,
        patiently: Patiently,
        pause: Callable[[], Awaitable[None]],
        tell: Callable[[str, str, int | None], None],
    ) -> None:
        self._client, self._channel, self._files = client, channel, files
        self._patiently, self._pause, self._tell = patiently, pause, tell
        self.room = 0  # bytes that an answer may have
        self._tries = 0

    async def settle(self) -> None:
        """Have the pending update summed; return when it is in a sum that counts, or raise why it is not taken."""
        pending = self._client.state.pending
        assert pending is not None
        self._tries = 0
        while True:
            said, _ = await self._channel.ask(Begin(round=pending.round, model=pending.model))
            if isinstance(said, messages.Accepted):
                return
            if isinstance(said, Try) and self._may_try(pending.round, said.attempt):
                try:
                    await self._take_part(said)
                except Breach as breach:
                    self._tell(
                        f"round {pending.round + 1}: a sum was not gone on with, {breach}", "broken", pending.round
                    )
                except Refused as refused:
                    if refused.code not in (Code.OTHER_TRY, Code.BREACH):
                        raise
            elif not isinstance(said, Try | messages.Wait):
                raise BadInput(f"the server answered {said.kind!r} to {Begin.kind!r}; is it a personafl server?")
            await self._pause()

    def _may_try(self, round_: int, attempt: str) -> bool:
        state = self._client.state
        return round_ > state.opened and state.tries.allow(round_, attempt)

    async def _take_part(self, offered: Try) -> None:
        """Go through the stages of a try, with fresh keys."""
        session, upload = self._agreed(offered)
        weight = self._weight()
        if weight > session.grid.weight:
            raise Breach(Fault.BAD_NUMBER, f"this device counts {weight:g}, and a sum is for {session.grid.weight:g}")
        self.room = _SMALL * (2 + offered.clients)
        credentials = Credentials.read(self._files.certificate.read_bytes(), self._files.key.read_bytes())
        authority = Authority(self._files.authority.read_bytes(), number_of)
        state = self._client.state
        await self._note(state.tries.with_keys(session.round, session.attempt))
        machine = Client(session, self._client.number, credentials, authority, state.tries.masked.values())
        roster = await self._said(session, 0, machine.advertise().encoded(), Roster)
        inbox = await self._said(session, 1, machine.share(roster).encoded(), Inbox)
        masked = machine.mask(inbox, await self._vector(session, upload, weight)).encoded()
        await self._note(state.tries.with_mask(machine.circle))
        self._tries += 1
        if self._tries > 1:  # the first was counted when it was trained
            self._client.guard.sends(len(masked), f"the update of round {session.round + 1}, once more")
        survivors = await self._said(session, 2, masked, Survivors)
        consents = await self._said(session, 3, machine.consent(survivors).encoded(), Consents)
        opened = machine.open(consents).encoded()
        await self._patiently(state.open, state.write)
        await self._channel.ask(Say(round=session.round, attempt=session.attempt, stage=4), opened)

    async def _note(self, tries: Tries) -> None:
        """Remember how far this is, before anybody hears of it."""
        state = self._client.state
        await self._patiently(lambda: state.tried(tries), state.write)

    def _agreed(self, offered: Try) -> tuple[Session, Any]:
        """Return the session that a device takes part in: what is safe it reads from the recipe."""
        client, secure, pending = self._client, self._client.recipe.secure, self._client.state.pending
        assert secure is not None
        assert pending is not None
        upload = client.pending_upload()
        session = Session(
            run=client.run,
            round=pending.round,
            attempt=offered.attempt,
            model=pending.model,
            least=secure.survivors(offered.clients),
            corrupt=secure.corrupted(offered.clients),
            length=length_of(upload) - (client.recipe.privacy is not None),  # with noise the loss is not sent
            grid=Grid(offered.most, offered.weight, secure.range),
        )
        return session, upload

    async def _vector(self, session: Session, upload: Any, weight: float) -> Vector:
        """Return what is masked of an update: with [privacy] also this device's share of the noise."""
        if self._client.recipe.privacy is None:
            return vector_of(upload, weight, session.grid)
        from personafl.deploy.device.sharing import noisy  # here, for other runs have no noise

        def made() -> Vector:
            return noisy(self._client, session, upload)

        found: Vector = await self._patiently(made, made)
        return found

    def _weight(self) -> float:
        return float(self._client.samples) if self._client.recipe.federation.weights == "examples" else 1.0

    async def _said(self, session: Session, stage: int, payload: bytes, kind: type[M]) -> M:
        """Say something in a stage, and return what follows it."""
        round_, attempt = session.round, session.attempt
        say = Say(round=round_, attempt=attempt, stage=stage)
        self._check(Noted, await self._channel.ask(say, payload))
        while True:
            said = await self._channel.ask(Follow(round=round_, attempt=attempt, stage=stage))
            if not isinstance(said.message, messages.Wait):
                return decoded(kind, self._check(Followed, said).payload)
            await self._pause()

    def _check(self, kind: type[messages.Message], said: Said) -> Said:
        if not isinstance(said.message, kind):
            raise BadInput(f"the server answered {said.message.kind!r} in a stage; is it a personafl server?")
        return said
