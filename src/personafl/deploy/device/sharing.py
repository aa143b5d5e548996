"""The share of the noise that a device adds to its update before that is masked (`privacy.distributed`).

    noise.key        32 random bytes in the device's directory, which nobody else has; made when they are first needed

How much noise that is the device finds in the recipe, and in who must be in a sum before it opens any: a server can ask
for less by saying that more devices take part, but then no sum of fewer is opened (`secure.client`). Noise is drawn
from the key, the round and the update itself, so that a device that was killed draws the same for the same.
"""

from pathlib import Path

import numpy as np

from personafl.core.tree import Tree
from personafl.deploy.device.keeping import kept_key
from personafl.deploy.device.training import LocalClient
from personafl.privacy.distributed import lattice_for, sent
from personafl.secure.fixed import Vector
from personafl.secure.messages import Session

KEY_FILE = "noise.key"


def noisy(client: LocalClient, session: Session, upload: Tree) -> Vector:
    """Return what is masked of an update: clipped, rounded, with this device's noise, modulo 2³²."""
    privacy = client.recipe.privacy
    assert privacy is not None
    assert privacy.noise is not None  # as the recipe was checked
    assert isinstance(privacy.clip, float)
    lattice = lattice_for(privacy.noise, session.grid.clients, session.least - session.corrupt, session.length)
    whole = sent(upload, privacy.clip, lattice, own_key(client.state.directory), session.round)
    return whole.numpy().astype(np.dtype("<u4"))


def own_key(directory: Path) -> bytes:
    """Return the key that a device has, or make it one.

    Another one after a loss does no harm: what was in a sum that may be known is in no other one (`state`).
    """
    return kept_key(directory / KEY_FILE)
