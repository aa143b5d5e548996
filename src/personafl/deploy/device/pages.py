"""What those who operate a device look at."""

import contextlib
import time
from collections.abc import AsyncIterator

from personafl.deploy.device.condition import Condition
from personafl.deploy.net.exposition import gauge, rendered
from personafl.deploy.net.identity import Files, identify
from personafl.deploy.net.messages import Refused
from personafl.deploy.net.scraping import scraped

_PROMPT = 10.0  # seconds that a server may take to answer, beside three heartbeats, before a device counts as cut off


@contextlib.asynccontextmanager
async def shown(address: str, files: Files, now: Condition) -> AsyncIterator[int | None]:
    """Show /metrics, /healthz and /readyz meanwhile; the port is given."""

    def metrics() -> tuple[int, str]:
        state = now.state
        found = [
            gauge(
                "device_rounds",
                "Rounds in which its updates were accepted, and count.",
                0 if state is None else len(state.rounds),
            ),
            gauge(
                "device_pending",
                "Whether it has an update whose fate it does not know.",
                state is not None and state.pending is not None,
            ),
            gauge("device_finished", "Whether it has its final model.", state is not None and state.finished),
            gauge("device_in_contact", "Whether its server answers.", _in_contact(now)),
            gauge("disk_full", "Whether something waits for space on the disk.", now.full),
        ]
        if (samples := now.protected) is not None:
            found.append(gauge("device_sample_steps", "Steps that have looked at protected samples.", samples.steps))
            if samples.epsilon is not None:
                found.append(gauge("device_sample_epsilon", "What was spent of its samples' privacy.", samples.epsilon))
        with contextlib.suppress(OSError, Refused):  # it is being renewed
            ends = identify(files.certificate.read_bytes()).ends
            found.append(gauge("certificate_end_seconds", "When its certificate ends.", ends.timestamp()))
        return 200, rendered(found)

    def readiness() -> tuple[int, str]:
        return (200, "ready\n") if _in_contact(now) else (503, "its server does not answer\n")

    pages = {"/metrics": metrics, "/healthz": lambda: (200, "ok\n"), "/readyz": readiness}
    async with scraped(address, pages) as port:
        yield port


def _in_contact(now: Condition) -> bool:
    """Say whether the server has answered lately."""
    answered = None if now.channel is None else now.channel.answered
    beats = 0.0 if now.section is None else 3 * now.section.heartbeat
    return answered is not None and time.monotonic() - answered <= _PROMPT + beats
