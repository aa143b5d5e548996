"""What a server writes after its last round."""

from pathlib import Path
from typing import Any

from personafl.core import rng, wire
from personafl.deploy.server.letters import Letters
from personafl.runs.start import START_FILE
from personafl.simulate.federation import Federation
from personafl.storage.files import atomic_write, write_json
from personafl.storage.seals import sealed


def write_results(path: Path, fed: Federation, letters: Letters, **facts: Any) -> None:
    """Write the shared model that a broadcast has; `facts` are of the run."""
    rule, problem, down = fed.algorithm.client, fed.problems[0], wire.dense(letters.message)
    models = rule.models(problem, down, rule.init(problem, down, rng.generator("shape")))
    atomic_write(path / START_FILE, *sealed(wire.encode(models.get("global", {}))))
    write_json(path / "deployed.json", {**facts, "model": letters.digest})
