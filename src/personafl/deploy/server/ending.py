"""What a server writes after its last round."""

from pathlib import Path
from typing import Any

from personafl.core import rng, wire
from personafl.core.algorithm import ClientRule, Problem
from personafl.core.tree import Tree
from personafl.deploy.net.messages import Payload, digest_of
from personafl.runs.start import START_FILE
from personafl.storage.files import atomic_write, write_json
from personafl.storage.seals import sealed


def write_results(path: Path, rule: ClientRule, problem: Problem, message: Tree, **facts: Any) -> bytes:
    """Write the shared model that a broadcast has, and return the broadcast whole; `facts` are of the run."""
    final, down = Payload(wire.encode(message)), wire.dense(message)
    models = rule.models(problem, down, rule.init(problem, down, rng.generator("shape")))
    atomic_write(path / START_FILE, *sealed(wire.encode(models.get("global", {}))))
    write_json(path / "deployed.json", {**facts, "model": digest_of(final)})
    return final
