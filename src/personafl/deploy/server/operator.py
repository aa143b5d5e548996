"""What an operator asks a server."""

import json
from typing import Any

from personafl.deploy.net.codes import Refused
from personafl.deploy.net.identity import Files
from personafl.deploy.net.messages import Report, Status
from personafl.deploy.net.transport import Channel, Unreachable
from personafl.errors import BadInput

_REPORT_BYTES = 2**24


async def ask_status(server: str, files: Files) -> dict[str, Any]:
    """Return how a server is doing."""
    channel = Channel(server, files, lambda kind: _REPORT_BYTES if kind == Report.kind else 0)
    try:
        _, report = await channel.ask(Status(), timeout=10.0, tries=3)
    except (Refused, Unreachable) as error:
        raise BadInput(f"--server {server}: {error}") from error
    finally:
        await channel.close()
    found: dict[str, Any] = json.loads(report)
    return found
