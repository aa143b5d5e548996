"""One hostile device of five, over real TLS: what becomes of the honest ones' models; prints a Markdown table.

    python tests/deploy/hostile.py [RULE …]             # default, mean, nnm; default without a word
    python tests/deploy/hostile.py run RULE ATTACK …    # ATTACK: none, honest, or its number; one JSON line each

A device with a valid certificate trains as it should, so that it knows what honest updates are like, and sends other
ones. Honest accuracy is the mean of what the four others keep and score on their own test data when all is over.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from processes import Cluster, cluster, recipe_of
from torch import Tensor

from personafl.core import wire
from personafl.models.modelfile import card_of
from personafl.recipe.recipe import Recipe

HOSTILE, CLAIMED, LONG = 4, 10**6, 9.9e5  # its number, its samples, and the norm of what it sends: deploy's bounds
RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "mean": {"robust": {"rule": "mean"}},
    "nnm": {"robust": {"rule": "trimmed-mean", "f": 1, "pre": ["nnm"]}},
}
DIGITS: dict[str, Any] = {
    "data": {"partition": {"kind": "dirichlet", "clients": 5, "alpha": 1.0}, "validation": 0.1},
    "model": {"name": "mlp", "hidden": [32]},
    "training": {"epochs": 1, "batch": 16, "lr": 0.1},
}


@dataclass(frozen=True)
class Assault:
    """What a device sends in place of its update, and how many samples it says it has; None: as many as it has."""

    name: str
    sent: Callable[[Tensor, torch.Generator], Tensor]  # of all numbers of an update, as one vector
    samples: int | None = None


def _random(update: Tensor, dice: torch.Generator) -> Tensor:
    return torch.randn(update.shape, generator=dice)


def _long(update: Tensor, dice: torch.Generator) -> Tensor:
    return -update * (LONG / update.norm())


HONEST = Assault("its update, as the others do", lambda update, dice: update)
ASSAULTS = (
    Assault("a random model", _random),
    Assault("a random model, 10⁶ samples", _random, CLAIMED),
    Assault("its sign flipped", lambda update, dice: -update),
    Assault("its sign flipped, 10⁶ samples", lambda update, dice: -update, CLAIMED),
    Assault("its sign flipped, norm 9.9 · 10⁵", _long),
    Assault("its sign flipped, norm 9.9 · 10⁵, 10⁶ samples", _long, CLAIMED),
)


@dataclass
class Infiltrated(Cluster):
    """A server with four honest devices, and a hostile one if there is an assault."""

    assault: Assault | None = None

    @property
    def names(self) -> list[str]:
        return [name for name in super().names if self.assault is not None or name != f"device-{HOSTILE}"]

    async def role(self, name: str, tell: Callable[[Any], None]) -> None:
        if name == f"device-{HOSTILE}":
            await self.attack()
        else:
            await super().role(name, tell)

    async def attack(self) -> None:
        """Take part to the end, with other updates than those that were trained."""
        from personafl.deploy.device.training import LocalClient
        from personafl.deploy.net.messages import Code, Finished, Hello, Knock, Leave, Pull, Refused, Task, Update
        from personafl.deploy.net.transport import Channel

        name = f"device-{HOSTILE}"
        line = Channel(f"localhost:{self.port}", self.files_of(name), lambda kind: 2**24)
        welcome, text = await line.ask(Knock())
        data, state = self.folder / "dealt" / f"{name}.safetensors", self.folder / "devices" / name
        run = welcome.run  # type: ignore[attr-defined]
        client = LocalClient.opened(text, "the server", str(data), HOSTILE, None, state, run)
        assert self.assault is not None
        samples = self.assault.samples or client.samples
        await line.ask(Hello(**{**client.hello, "samples": samples}))
        while True:
            said = await line.ask(Pull(returning=client.state.known))
            if isinstance(said.message, Finished):
                await line.ask(Leave())
                await line.close()
                return
            if not isinstance(said.message, Task):
                continue
            client.train(said.message.round, said.message.model, said.payload)
            pending = client.state.pending
            assert pending is not None
            told = Update(round=pending.round, model=pending.model, samples=samples)
            try:
                await line.ask(told, poisoned(pending.update, self.assault, pending.round))
                client.state.accepted()
            except Refused as refused:
                if refused.code is not Code.ROUND_CLOSED:  # else it was slower than the deadline
                    raise
                client.state.refused()


def poisoned(payload: bytes, assault: Assault, round_: int) -> bytes:
    """Return what is sent in place of an update."""
    named = wire.decode_named(payload)
    numbers = {name: leaf for name, leaf in named.items() if name != "loss"}
    flat = torch.cat([leaf.flatten() for leaf in numbers.values()])
    bad = assault.sent(flat, torch.Generator().manual_seed(round_)).split([leaf.numel() for leaf in numbers.values()])
    shaped = {name: part.reshape(leaf.shape) for part, (name, leaf) in zip(bad, numbers.items(), strict=True)}
    return wire.encode({**named, **shaped})


def recipe_for(rule: str, rounds: int, devices: int) -> Recipe:
    return recipe_of("fedavg", 5, {"devices": devices, "deadline": 3600.0}, rounds=rounds, **DIGITS, **RULES[rule])


def accuracy(rule: str, assault: Assault | None, rounds: int = 20) -> dict[str, Any]:
    """Return what the honest devices' models score in the mean, and who was clipped."""
    began = time.monotonic()
    with cluster(recipe_for(rule, rounds, 5 if assault else 4), Infiltrated) as made:
        made.assault = assault
        for name in made.names:
            made.start(name)
        made.wait()  # and all have ended well
        cards = [card_of(made.folder / "devices" / f"device-{n}" / "model.safetensors") for n in range(HOSTILE)]
        scores = [float(card.test_accuracy) for card in cards]
        assert all(map(math.isfinite, scores))
        clipped = [entry.get("clipped", []) for entry in made.journal() if entry["event"] == "closed"]
        return {
            "rounds": len(clipped),
            "accuracy": sum(scores) / len(scores),
            "clipped": sum(HOSTILE in own for own in clipped),
            "honest": sum(len(set(own) - {HOSTILE}) for own in clipped) / HOSTILE / len(clipped),
            "warned": [line for line in made.log("server").splitlines() if line.startswith("suspect: ")],
            "seconds": round(time.monotonic() - began, 1),
        }


def table(rules: list[str]) -> Iterator[str]:
    yield "| one device of five sends | " + " | ".join(rules) + " |"
    yield "|---|" + "---|" * len(rules)
    for assault in (None, HONEST, *ASSAULTS):
        found = [accuracy(rule, assault) for rule in rules]
        print(found, file=sys.stderr, flush=True)
        cells = [f"{100 * one['accuracy']:.1f}" for one in found]
        yield f"| {'nothing: four honest devices' if assault is None else assault.name} | " + " | ".join(cells) + " |"


def main(words: list[str]) -> None:
    if words[:1] == ["run"]:
        for word in words[2:]:
            assault = {"none": None, "honest": HONEST}[word] if word.isalpha() else ASSAULTS[int(word)]
            print(json.dumps(accuracy(words[1], assault)), flush=True)
        return
    for line in table(words or ["default"]):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
