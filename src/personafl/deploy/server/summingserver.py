"""A server that sees nothing of updates but their sum: with its devices it goes through the stages of `secure`."""

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor

from personafl.deploy.net import messages
from personafl.deploy.net.identity import Identity, number_of
from personafl.deploy.net.messages import Code, Heard, Message, Part, Refused, Said
from personafl.deploy.net.stages import Begin, Follow, Followed, Noted, Say
from personafl.deploy.server.server import Server, ServerConfig
from personafl.deploy.server.service import Event, Listener
from personafl.deploy.server.summing import Ended, SummedRounds
from personafl.secure.credentials import Authority
from personafl.secure.server import Stage


async def run_summing_server(config: ServerConfig, listener: Listener) -> SummedRounds:
    """Serve a recipe with [secure] to its end, from wherever its directory says it is."""
    authority = Authority(config.files.authority.read_bytes(), number_of)
    with ThreadPoolExecutor(1, "rounds") as worker:
        made = functools.partial(SummedRounds, config.recipe, config.out, authority)
        rounds = await asyncio.get_running_loop().run_in_executor(worker, made)
        with rounds:
            await SummingServer(config, rounds, worker, listener).run()
        return rounds


class SummingServer(Server):
    """A run of sums that is being served."""

    _rounds: SummedRounds

    async def _collect(self) -> None:
        """Try to sum the open round, until there is a sum or there cannot be one."""
        rounds = self._rounds
        while True:
            await self._surely(rounds.try_now)
            self._offered.ring()
            ended = await self._summed()
            if ended is None:
                await self._surely(rounds.take_sum)
                return
            number = None if rounds.open is None else rounds.open.number
            self._tell(Event("broken", f"{ended.why}; {'tried again' if ended.again else 'no sum'}", round=number))
            if not ended.again:
                return
            alive = self._alive(self._lost)
            await self._surely(lambda: rounds.widen(alive))  # noqa: B023 - awaited at once
            self._started = self._now()

    async def _summed(self) -> Ended | None:
        """Go through the stages; return why there is no sum, if there is none."""
        rounds = self._rounds
        while rounds.stage is not Stage.DONE:
            await self._stage_over()
            ended = await self._surely(rounds.close_stage)
            self._offered.ring()
            if ended is not None:
                return ended
        return None

    async def _stage_over(self) -> None:
        """Wait until all have spoken in a stage, or its time is over; for keys, as long as training may take."""
        rounds, began = self._rounds, self._now()
        keys, seconds = rounds.stage is Stage.KEYS, rounds.recipe.secure.stage if rounds.recipe.secure else 0.0

        def over() -> bool:
            self._look_at_revocations()
            if keys:
                if rounds.all_heard and rounds.enough_heard:
                    return True
                return self._overdue(rounds.section.deadline)
            return rounds.all_heard or self._now() > began + seconds

        await self._until(over)

    def _allowed(self, identity: Identity, message: Message, part: Part) -> int:
        if isinstance(message, Say):
            identity.check_role("device")
            return self._rounds.room(identity, message)
        if isinstance(message, messages.Update):
            raise Refused(Code.UNKNOWN_KIND, "updates are summed unseen here, and none is taken singly")
        return super()._allowed(identity, message, part)

    async def _answer(self, identity: Identity, said: Heard) -> Said:
        message, payload = said
        if isinstance(message, messages.Update):
            raise Refused(Code.UNKNOWN_KIND, "updates are summed unseen here, and none is taken singly")
        if not isinstance(message, Begin | Say | Follow):
            return await super()._answer(identity, said)
        identity.check_role("device")
        rounds, number = self._rounds, identity.number
        assert number is not None
        self._seen[number] = self._now()
        if self._started is None:  # devices have trained before this server was started
            self._started = self._now()
        if isinstance(message, Say):
            await self._work(lambda: rounds.say(identity, message, payload))
            self._notify()
            return Said(Noted())
        await self._offered.within(rounds.section.heartbeat, lambda: rounds.is_ready(message, number))
        if isinstance(message, Begin):
            found = await self._work(lambda: rounds.offered(identity, message))
            return Said(messages.Wait() if found is None else found)
        told = await self._work(lambda: rounds.followed(identity, message))
        return Said(messages.Wait()) if told is None else Said(Followed(), told)
