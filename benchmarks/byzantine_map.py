"""ByzFL's map of MNIST: accuracy by how much clients are alike and how many are hostile, of shared and personal models.

    python benchmarks/byzantine_map.py --data ../shared/data/mnist/mnist.npz --out map.json --jobs 14 --minutes 5
    python benchmarks/byzantine_map.py --out map.json --draw docs/robust-map.svg

The setting is that of byzfl's benchmark (github.com/LPD-EPFL/byzfl, its default_config): 10 honest clients, f hostile
ones, a share γ of the 48,000 training images dealt at random and the rest sorted by label; two convolutions of 20 and
50 filters, 500 units; each step every client sends the running mean (momentum 0.9) of its gradients on 25 images; the
server clips them to 2, mixes nearest neighbours, and takes the trimmed mean or the geometric median (ν = 0.1, 3 steps)
at rate 0.1. The attacks are byzfl's: minus the mean (its sign flip), and its optimal IPM and ALIE, which adds
deviations to gradients, so that weights sink. In the other direction, as this project's ALIE has it, they rise: that is
"up", and not part of the map. As there, the model is the one of the step, of every 50th, that is best on 12,000
validation images. Test images of a class are dealt as its training images are: so personal models are scored on each
client's own distribution, and the shared one on all images.

Every run is one of a personal method's; Ditto's shared model is FedAvg's. Runs go to `--jobs` processes, what --out has
already is not done again, and after --minutes the rest is left out. --draw prints the table and draws the map.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from jobs import ran
from personafl.algorithms import METHODS
from personafl.algorithms.training import Training
from personafl.core import tree
from personafl.core.algorithm import Algorithm, ClientRule, Problem, untrained_upload
from personafl.core.batches import Data, Steps
from personafl.core.losses import cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.core.tree import Params, Tree
from personafl.data.federated import Clients, FederatedData, Ragged, make_federated
from personafl.errors import Diverged
from personafl.evaluate.score import try_personal, try_shared
from personafl.models.parts import personal_split
from personafl.report.svg import COLOURS, document, rect, text, write_svg
from personafl.robust.mixing import Clip
from personafl.robust.rule import Mix, Rule, mixing
from personafl.robust.table import MIXES, RULES
from personafl.simulate.attack import Attack, worst_strength
from personafl.simulate.engine import Engine
from personafl.simulate.federation import Federation
from personafl.simulate.simulator import Simulation
from personafl.storage.store import Store
from personafl.uploads.robust import made_robust

HONEST, BATCH, RATE, MOMENTUM, CLIP, NU, EVERY = 10, 25, 0.1, 0.9, 2.0, 0.1, 50
RULE_NAMES = {"trimmed-mean": {}, "geometric-median": {"smoothing": RATE * NU, "steps": 3}}
ATTACKS: dict[str, tuple[Any, float]] = {  # byzfl's sign flip is IPM of strength 1
    "optimal-alie": ("optimal-alie", 1e6),
    "sign-flip": ("ipm", 1.0),
    "optimal-ipm": ("optimal-ipm", 1e6),
}
UP = "optimal-alie-up"  # the same in the other direction, which is not among byzfl's
PERSONAL = ("fedrep", "fedalt", "quped", "fedslr")  # beside Ditto, where a shared model is lost
PRINTED = {  # by byzfl, γ = 0.33
    "trimmed-mean": {1: 0.98, 2: 0.97, 3: 0.94, 4: 0.91},
    "geometric-median": {1: 0.98, 2: 0.96, 3: 0.94, 4: 0.94},
}


class Cell(NamedTuple):
    """One run."""

    gamma: float
    f: int
    rule: str
    attack: str
    method: str

    @property
    def name(self) -> str:
        """What it is called among results."""
        return "/".join(map(str, self))


def cells(gammas: list[float]) -> Iterator[Cell]:
    """Yield the runs, those that matter most first."""
    for gamma in gammas:
        hostile = (4,) if gamma == 0 else (4, 3, 2, 1)
        for attack, f, rule in itertools.product(ATTACKS, hostile, RULE_NAMES):
            yield Cell(gamma, f, rule, attack, "ditto")
    if 0 in gammas:
        for name, attack in itertools.product(PERSONAL, ATTACKS):
            yield Cell(0.0, 4, "trimmed-mean", attack, name)
        for f, attack, rule in itertools.product((3, 2, 1), ATTACKS, RULE_NAMES):
            yield Cell(0.0, f, rule, attack, "ditto")
    for f, rule in itertools.product((4, 3, 2, 1), RULE_NAMES):
        yield Cell(gammas[0], f, rule, UP, "ditto")
    if 0 in gammas:
        for name, attack in itertools.product(PERSONAL, ATTACKS):
            yield Cell(0.0, 4, "geometric-median", attack, name)


# The data.


def dealt(y: Tensor, gamma: float, clients: int, rng: np.random.Generator) -> list[Any]:
    """Return the places of y for each client: a share γ at random, the rest sorted by label."""
    order = rng.permutation(len(y))
    alike = int(gamma * len(y))
    rest = order[alike:]
    by_label = rest[np.argsort(y.numpy()[rest], kind="stable")]
    parts = zip(np.array_split(order[:alike], clients), np.array_split(by_label, clients), strict=True)
    return [np.concatenate(pair) for pair in parts]


def dealt_alike(y: Tensor, like: list[Any], labels: Tensor, rng: np.random.Generator) -> list[Any]:
    """Return the places of y for each client, each class in the parts in which clients have those of `labels`."""
    found: list[list[Any]] = [[] for _ in like]
    for label in np.unique(y.numpy()):
        have = np.cumsum([(labels.numpy()[rows] == label).sum() for rows in like])
        own = rng.permutation(np.flatnonzero(y.numpy() == label))
        cuts = np.rint(have[:-1] / max(1, have[-1]) * len(own)).astype(int)
        for rows, part in zip(found, np.split(own, cuts), strict=True):
            rows.append(part)
    return [np.concatenate(parts) for parts in found]


@functools.cache
def mnist(path: Path, most: int | None) -> tuple[Tensor, Tensor, int]:
    """Return images as byzfl has them, labels, and how many of both are for training."""
    with np.load(path) as arrays:
        x, y, test = arrays["images"], arrays["labels"], arrays["split"].astype(bool)
    rows = [np.flatnonzero(~test)[:most], np.flatnonzero(test)[:most]]
    order = np.concatenate(rows)
    images = torch.from_numpy(x[order]).reshape(-1, 1, 28, 28).to(torch.float32) / 255
    return (images - 0.1307) / 0.3081, torch.from_numpy(y[order].astype(np.int64)), len(rows[0])


def federated(known: tuple[Tensor, Tensor, int], gamma: float, f: int) -> FederatedData:
    """Return the data of honest clients 0 … 9, and of f hostile ones, who have samples only in order to take part."""
    x, y, many = known
    rng = np.random.default_rng(0)
    order = rng.permutation(many)
    train, validation = np.sort(order[: int(0.8 * many)]), order[int(0.8 * many) :]
    own = [train[places] for places in dealt(y[train], gamma, HONEST, rng)]
    test = [many + places for places in dealt_alike(y[many:], own, y, rng)]
    others = [np.zeros(0, dtype=np.int64)] * f
    every = HONEST + f
    return make_federated(
        name="mnist",
        x=x,
        y=y,
        classes=10,
        train=Ragged.from_lists([*own, *(train[:BATCH] for _ in range(f))]),
        validation=Ragged.from_lists([*np.array_split(validation, HONEST), *others]),
        test=Ragged.from_lists([*test, *others]),
        seen=np.arange(every),
        unseen=np.arange(0),
        client_names=tuple(map(str, range(every))),
        label_names=tuple(map(str, range(10))),
    )


def network() -> nn.Module:
    """Return byzfl's network for MNIST: 431,080 parameters."""
    layers = [nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


# The methods: with the running mean of what they send in place of it.


class Remembered(NamedTuple):
    """State of a client: the method's own, and the running mean of its uploads."""

    own: Tree
    mean: Tree


@dataclass(frozen=True, kw_only=True)
class WithMomentum(ClientRule):
    """Client rule: another one's, which sends m ← β m + (1 − β) u in place of u."""

    rule: ClientRule
    beta: float = MOMENTUM

    @property
    def phases(self) -> Mapping[str, Steps]:
        """As the method."""
        return self.rule.phases

    @property
    def uploads(self) -> type[Any]:
        """As the method."""
        return self.rule.uploads

    def expects(self, problem: Problem, start: Params) -> Tree:
        """As the method."""
        return self.rule.expects(problem, start)

    def init(self, problem: Problem, down: Any, generator: torch.Generator) -> Remembered:
        """As the method, and m = 0."""
        own = self.rule.init(problem, down, generator)
        return Remembered(own, tree.zeros_like(untrained_upload(self.rule, problem, down, own)))

    def update(self, problem: Problem, down: Any, state: Remembered, data: Data) -> tuple[Remembered, Tree]:
        """Send the running mean."""
        own, upload = self.rule.update(problem, down, state.own, data)
        mean: Any = tree.map(lambda old, new: self.beta * old + (1 - self.beta) * new, state.mean, upload)
        return Remembered(own, mean), mean._replace(loss=upload.loss)

    def models(self, problem: Problem, down: Any, state: Remembered) -> dict[str, Params]:
        """As the method."""
        return self.rule.models(problem, down, state.own)


def method(name: str) -> Algorithm:
    """Return a method that takes one step a round; FedRep five on its head, and Ditto clipped ones on its own model.

    FedSLR is LPGD, whose server takes the mean alone, with no penalty on ranks: 8,000 singular value decompositions.
    """
    optimizer = Sgd(lr=RATE, weight_decay=1e-4)
    training = Training(work=Steps(steps=1, batch=BATCH), optimizer=optimizer)
    options: dict[str, Any] = {"fedrep": {"head_epochs": 1}, "quped": {"bits": 2}, "fedalt": {"personal_lr": RATE}}
    options["fedslr"] = {"solver": "lpgd", "rank_penalty": 0.0, "personal_lr": RATE}
    made = METHODS[name].build(training, **options.get(name, {}))
    client: Any = made.client
    if name == "fedrep":
        client = dataclasses.replace(client, personal=dataclasses.replace(training, work=Steps(steps=5, batch=BATCH)))
    if name == "ditto":  # which else diverges where it is pulled towards a model that is lost
        calmer = dataclasses.replace(optimizer, lr=RATE / 2, clip=CLIP)
        client = dataclasses.replace(client, personal=dataclasses.replace(training, optimizer=calmer))
    return dataclasses.replace(made, client=WithMomentum(rule=client))


# The attack, and the run.


@dataclass(frozen=True, eq=False)
class QuickAttack(Attack):
    """The attack, which looks for its strength among few numbers: the same one as with the server itself, but sooner.

    All that is sent is a sum of the honest uploads and their deviation, B [k, d]. By coordinates in the span of these,
    vectors are as far from each other as they are, so a rule's choice can be made with k numbers of each. Harm is as
    byzfl has it: how far the result is from the mean of what the honest sent.
    """

    rule: Rule = dataclasses.field(default_factory=Rule)
    before: tuple[Mix, ...] = ()
    sign: float = 1.0  # of the deviation
    stride: int = 8  # where each coordinate has a choice of its own, harm is looked for in one of so many

    def _worst(self, chunks: Any, number: int, model: Callable[[Any], Tree]) -> float:
        sent = torch.cat([_flat(uploads) for _, uploads in chunks])
        hostile = self.hostile[np.concatenate([clients for clients, _ in chunks])]
        honest = sent[torch.from_numpy(~hostile).to(sent.device)]
        deviation = (honest - honest.mean(0)).square().sum(0).div(len(honest) - 1).sqrt()
        basis = torch.cat([honest, deviation[None]])
        gram = sum((part @ part.T for part in basis.to(torch.float64).split(2**17, dim=1)), torch.zeros(()).to(basis))
        values, vectors = torch.linalg.eigh(gram.cpu())
        root = vectors * values.clamp(min=0).sqrt()
        many, some = len(honest), basis[:, :: self.stride].contiguous()
        wanted = torch.tensor([1 / many] * many + [0.0], dtype=torch.float64)  # as byzfl: what nobody has clipped

        def off(lean: float, strength: float) -> float:
            made = torch.zeros(len(sent), many + 1, dtype=torch.float64)
            made[torch.from_numpy(~hostile), :many] = torch.eye(many, dtype=torch.float64)
            made[torch.from_numpy(hostile)] = torch.tensor([lean / many] * many + [strength], dtype=torch.float64)
            weights = mixing(self.rule, lambda: iter([made @ root]), len(sent), self.before, 0)
            rows = made if weights is None else weights @ made
            if type(self.rule).reduce is Rule.reduce:
                return float(((rows[0] - wanted) @ root).square().sum())
            return float(self.rule.reduce((rows - wanted).to(basis) @ some).square().sum())

        mean = self.kind == "optimal-ipm"

        def harm(strength: float) -> float:
            return off(-strength, 0.0) if mean else off(1.0, self.sign * strength)

        return worst_strength(harm, self.strength) * (1.0 if mean else self.sign)


def _flat(uploads: Tree) -> Tensor:
    return torch.cat([leaf.flatten(1) for name, leaf in tree.flatten(uploads).items() if name != "loss"], dim=1)


class Held(Simulation):
    """A simulation whose states stay where they are computed, for everyone is in every round, in the same chunk.

    The hostile do not train: what they send is made of what the honest do.
    """

    held: dict[tuple[int, ...], Tree]

    def results(self, cohort: Clients, message: Tree, number: int, server: Any = None) -> Iterator[tuple[Clients, Any]]:
        """Train the honest, and yield the last of them once more for each hostile one."""
        done: Any = None
        for clients, done in super().results(cohort[:HONEST], message, number, server):
            yield clients, done
        if len(others := cohort[HONEST:]):
            last = torch.full((len(others),), -1)
            names = ("states", "uploads", "finite")
            yield others, done._replace(**{name: tree.map(lambda x: x[last], getattr(done, name)) for name in names})

    def _keep(self, clients: Clients, states: Tree) -> None:
        self.held[tuple(clients.tolist())] = states

    def states(self, which: int, down: Tree, clients: Clients) -> Tree:
        """Return the stacked states of clients."""
        found = self.held.get(tuple(clients.tolist()))
        return super().states(which, down, clients) if found is None else found

    def states_of(self, count: int) -> Tree:
        """Return the stacked states of the first clients, in their order."""
        order = np.argsort(np.concatenate([np.array(clients) for clients in self.held]))[:count]
        places = torch.from_numpy(order).to(self._device)
        return tree.map(lambda *parts: torch.cat(parts)[places], *self.held.values())


def simulation(cell: Cell, data: FederatedData, folder: Path, quick: bool = True) -> Held:
    """Return a run before its first round."""
    device, f = data.device, cell.f
    algorithm = method(cell.method)
    rule = RULES[cell.rule](f=f, **RULE_NAMES[cell.rule])
    before = (MIXES["nnm"](f=f),)
    algorithm = made_robust(algorithm, rule=rule, before=before, clip=RATE * CLIP)
    hostile = np.arange(data.clients) >= HONEST
    kind, strength = ATTACKS[cell.attack.removesuffix("-up")]
    known: Any = {"kind": kind, "hostile": hostile, "strength": strength, "seed": 0}
    clipped = (Clip(norm=RATE * CLIP), *before)
    sign = 1.0 if cell.attack == UP else -1.0  # uploads are steps against the gradient
    attack = QuickAttack(**known, rule=rule, before=clipped, sign=sign) if quick else Attack(**known)
    torch.manual_seed(0)
    module = network()
    split = None if algorithm.personal is None else personal_split(module, algorithm.personal)
    problem = Problem(Net(module).to(device, torch.float32), cross_entropy, split=split, data=data.shape)
    federation = Federation(
        algorithm=algorithm,
        data=data,
        problems=(problem,),
        problem_of=np.zeros(data.clients, dtype=np.int64),
        engines=(Engine.fitted(problem, "auto", 2**33, device),),
        seed=0,
        cohort=data.clients,
        sampling="exact",
        weights="uniform",
        dtype=torch.float32,
        attack=attack,
    )
    made = Held(federation, Store(folder, 2**30))
    made.held = {}
    return made


def measured(cell: Cell, data: FederatedData, steps: int) -> dict[str, Any]:
    """Run it; return accuracies of the shared model by step, and of personal ones at the end."""
    began, honest = time.perf_counter(), np.arange(HONEST)
    with tempfile.TemporaryDirectory() as folder:
        simulated = simulation(cell, data, Path(folder) / "states")
        problem, rule = simulated.federation.problems[0], simulated.federation.algorithm.client
        curve: list[tuple[int, float, float]] = []
        for number in range(steps):
            try:
                simulated.step(number)
            except Diverged:  # what was found until then counts
                break
            if (number + 1) % EVERY == 0 or number + 1 == steps:
                params = simulated.global_model(simulated.down())
                assert params is not None
                tried = [try_shared(problem, params, data, rows, honest) for rows in (data.validation, data.test)]
                curve.append((number + 1, *(float(outcomes.hits.mean()) for outcomes in tried)))
        best = max(curve, key=lambda point: point[1])
        found = {"steps": number + 1, "shared": best[2], "last": curve[-1][2], "curve": curve}
        down = simulated.down()
        own = vmap(lambda state: rule.models(problem, down, state)["personal"])(simulated.states_of(HONEST))
        personal = try_personal(problem, own, data, data.test, honest).scores().accuracy
    found |= {"personal": float(personal.mean()), "worst": float(personal.min())}
    return found | {"seconds": time.perf_counter() - began}


def one(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Do one run by its name."""
    gamma, f, *rest = name.split("/")
    cell = Cell(float(gamma), int(f), *rest)
    data = federated(mnist(options["data"], options["samples"]), cell.gamma, cell.f)
    device = torch.device(options["device"])
    data = dataclasses.replace(data, x=data.x.to(device), y=data.y.to(device))
    return measured(cell, data, options["steps"])


# The table and the picture.


def worst(runs: Mapping[str, Any], what: str, method_: str = "ditto") -> dict[tuple[str, float, int], float]:
    """Return the least accuracy of any attack, by rule, γ and f; where all three attacks are there."""
    found: dict[tuple[str, float, int], list[float]] = {}
    for name, values in runs.items():
        gamma, f, rule, attack, own = name.split("/")
        if own == method_ and attack != UP:
            found.setdefault((rule, float(gamma), int(f)), []).append(values[what])
    return {key: min(values) for key, values in found.items() if len(values) == len(ATTACKS)}


def table(runs: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for the docs."""
    shared, personal, least = (worst(runs, what) for what in ("shared", "personal", "worst"))
    yield "| γ | f | rule | shared | byzfl's | personal (Ditto) | least client |"
    yield "|---|---|---|---|---|---|---|"
    for rule, gamma, f in sorted(shared, key=lambda key: (-key[1], key[2], key[0])):
        key = rule, gamma, f
        printed = f"{PRINTED[rule][f]:.2f}" if gamma == 0.33 else ""
        yield (
            f"| {gamma:g} | {f} | `{rule}` | {shared[key]:.3f} | {printed} | {personal[key]:.3f} | {least[key]:.3f} |"
        )
    for name, values in sorted(runs.items()):
        if f"/{UP}/" in name:
            yield f"{name}: {values['shared']:.3f}, personal {values['personal']:.3f}"
    for name in PERSONAL:
        for (rule, gamma, f), value in worst(runs, "personal", name).items():
            low = worst(runs, "worst", name)[rule, gamma, f]
            yield f"{name}, γ = {gamma:g}, f = {f}, {rule}: {value:.3f}, least client {low:.3f}"


def picture(runs: Mapping[str, Any]) -> str:
    """Return the map: for each rule the shared model, and beside it the personal ones."""
    width, size, left, top = 720.0, 66.0, 70.0, 118.0
    parts, bottom = [], top
    panels = [("shared model", "shared"), ("personal models (Ditto)", "personal")]
    for down, rule in enumerate(RULE_NAMES):
        found = {what: worst(runs, what) for _, what in panels}
        gammas = sorted({gamma for _, gamma, _ in found["shared"]}, reverse=True)
        height = len(gammas) * 38.0
        for across, (title, what) in enumerate(panels):
            x, y = left + across * 340, top + down * (height + 86)
            parts.append(text(x, y - 12, f"{rule.replace('-', ' ')}: {title}", bold=True))
            for (row, gamma), f in itertools.product(enumerate(gammas), (1, 2, 3, 4)):
                value = found[what].get((rule, gamma, f))
                box = x + (f - 1) * size, y + row * 38, size - 3, 35.0
                parts.append(rect("cell", *box, COLOURS[0], 0.04 if value is None else max(0.06, 0.8 * value)))
                if value is not None:
                    words = text(box[0] + 31, box[1] + 22, f"{value:.2f}", anchor="middle")
                    parts.append(f'<g fill="{"#fff" if value > 0.5 else "#111"}">{words}</g>')
            parts += [text(x - 8, y + row * 38 + 22, f"γ = {g:g}", anchor="end") for row, g in enumerate(gammas)]
            parts += [text(x + (f - 1) * size + 31, y + height + 16, f"f = {f}", anchor="middle") for f in (1, 2, 3, 4)]
            bottom = y + height + 34
    subtitle = (
        "MNIST, 10 honest clients and f hostile, a share γ of their data alike; test accuracy, worst of 3 attacks"
    )
    return document("What hostile clients take, and personal models give back", subtitle, width, bottom, parts)


def main() -> None:
    """Run, or draw what was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="MNIST as one npz; left out: nothing is run")
    parser.add_argument("--out", type=Path, required=True, help="the results, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no more is done")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--gammas", default="0.33,0", help="in the order of what matters most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, help="take only the first of training and of test images, to try it")
    parser.add_argument("--first", type=int, help="do only so many runs, to try it")
    parser.add_argument("--draw", type=Path, help="write the map there")
    options = parser.parse_args()
    options.gammas = [float(gamma) for gamma in options.gammas.split(",")]
    wanted = [cell.name for cell in cells(options.gammas)][: options.first]
    runs = ran(one, wanted if options.data else [], vars(options), options.out, options.jobs, options.minutes)
    print(*table(runs), sep="\n")
    if options.draw is not None:
        write_svg(picture(runs), options.draw)


if __name__ == "__main__":
    main()
