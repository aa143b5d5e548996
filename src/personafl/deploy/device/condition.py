"""How a device is, for those who operate it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from personafl.deploy.device.state import DeviceState
from personafl.deploy.net.transport import Channel
from personafl.recipe.deploy import DeploySection

if TYPE_CHECKING:
    from personafl.deploy.device.protecting import Samples


@dataclass
class Condition:
    """What there is of a device by now."""

    state: DeviceState | None = None
    section: DeploySection | None = None
    channel: Channel | None = None
    protected: Samples | None = None  # what was spent of its samples' privacy; None: they are not protected
    full: bool = False  # it waits for space on the disk
