"""How a device is, for those who operate it."""

from dataclasses import dataclass

from personafl.deploy.device.state import DeviceState
from personafl.deploy.net.transport import Channel
from personafl.recipe.deploy import DeploySection


@dataclass
class Condition:
    """What there is of a device by now."""

    state: DeviceState | None = None
    section: DeploySection | None = None
    channel: Channel | None = None
    full: bool = False  # it waits for space on the disk
