"""What an operator asks of a server, besides how it is doing."""

from personafl.deploy.net import messages
from personafl.deploy.net.identity import Files
from personafl.deploy.net.messages import Refused
from personafl.deploy.net.transport import Channel, Unreachable
from personafl.errors import BadInput


async def ask_drop(server: str, files: Files, name: str, *, undo: bool, to: str | None = None) -> bool:
    """Have a server leave a device out, or let it in again, or a coordinator a server; return whether it was before."""
    channel = Channel(server, files, lambda kind: 0)
    try:
        dropped, _ = await channel.ask(messages.Drop(name=name, undo=undo, to=to), timeout=10.0, tries=3)
    except (Refused, Unreachable) as error:
        raise BadInput(f"--server {server}: {error}") from error
    finally:
        await channel.close()
    return isinstance(dropped, messages.Dropped) and dropped.before
