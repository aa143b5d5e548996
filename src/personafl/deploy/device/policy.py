"""What the owner of a device agrees to: bounds in a file of the device, whatever recipe a server sends.

All is compared before anything is trained, and before a server has heard more than that the device is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

from pydantic import Field, PrivateAttr, ValidationError, field_validator

from personafl.algorithms import METHODS
from personafl.core.batches import Steps
from personafl.deploy.device.limits import data_bytes, within_bytes, within_seconds
from personafl.errors import BadInput, Failed, did_you_mean
from personafl.options import Positive, Strict, check_numbers, explain
from personafl.recipe.recipe import Recipe
from personafl.recipe.values import read_toml
from personafl.storage.files import read_json, write_json

T = TypeVar("T")
Megabytes = Annotated[float, Field(gt=0)]
MB = 2**20


class Policy(Strict):
    """What may be asked of a device."""

    methods: tuple[str, ...] | None = None  # that it runs; None: all that are installed
    recipe: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # SHA-256 of the only one; None: any
    least_batch: Positive = 1  # samples of a step
    least_steps: Positive = 1  # of training, in a round
    least_samples: Positive = 2  # different ones that an update is made from: from a single one it gives that away
    most_rounds: Positive | None = None  # of the recipe
    most_seconds: Annotated[float, Field(gt=0)] | None = None  # of a round's training; then it is ended
    most_memory_mb: Positive | None = None  # that the recipe may take, beside the program; then it is ended
    most_up_mb: Megabytes | None = None  # that is sent for a round
    most_down_mb: Megabytes | None = None  # that is received for a round
    most_up_total_mb: Megabytes | None = None  # that is ever sent from one --state
    most_down_total_mb: Megabytes | None = None  # that is ever received there
    least_sample_noise: Annotated[float, Field(gt=0)] | None = None  # of [sample_privacy]
    most_sample_epsilon: Annotated[float, Field(gt=0)] | None = None  # that a recipe's budget of it has
    most_sample_delta: Annotated[float, Field(gt=0, lt=1)] | None = None  # with it
    sums: bool = True  # whether means and spreads of inputs may be sent (data.normalize = "auto")
    personal: bool = True  # whether methods may send what is, or tells, a part of the device's own state

    _file: str = PrivateAttr("without --policy")

    @field_validator("methods")
    @classmethod
    def _there(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in names or ():
            if name not in METHODS:
                raise ValueError(f"no method {name!r}; {did_you_mean(name, METHODS)}")
        return names

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy file."""
        if not path.is_file():
            raise BadInput(f"--policy {path}: no such file")
        values = read_toml(path)
        try:
            policy = cls.model_validate(values)
            check_numbers(values, policy)
        except ValidationError as error:
            raise BadInput(f"{path}: {explain(error, '', cls)}") from error
        except BadInput as problem:
            raise BadInput(f"{path}: {problem}") from problem
        policy._file = str(path)
        return policy

    def refusal(self, key: str, has: str) -> str:
        """Return the line that says which key of the policy something is against."""
        value = getattr(self, key)
        shown = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else value
        return f"{self._file}: {key} = {list(shown) if isinstance(shown, tuple) else shown}: {has}"

    def _refuse(self, key: str, has: str) -> NoReturn:
        raise BadInput(f"{self.refusal(key, has)}; nothing was trained, and no update was sent")

    def check_recipe(self, recipe: Recipe, digests: tuple[str, ...], whose: str) -> None:
        """Fail if a recipe is not agreed to, by what it says alone."""
        if self.recipe is not None and self.recipe not in digests:
            self._refuse("recipe", f"{whose} has the digest {digests[0]}")
        if self.methods is not None and recipe.method.name not in self.methods:
            self._refuse("methods", f"{whose} has method.name = {recipe.method.name!r}")
        if self.most_rounds is not None and recipe.rounds > self.most_rounds:
            self._refuse("most_rounds", f"{whose} has rounds = {recipe.rounds}")
        for key in ("noise", "epsilon", "delta"):
            bound = "least_sample_noise" if key == "noise" else f"most_sample_{key}"
            least, has = getattr(self, bound), getattr(recipe.sample_privacy, key, None)
            if least is not None and (has is None or (has < least if key == "noise" else has > least)):
                self._refuse(
                    bound, f"{whose} has {f'sample_privacy.{key} = {has:g}' if has else f'no sample_privacy.{key}'}"
                )

    def check_work(self, recipe: Recipe, work: Steps, samples: int, whose: str) -> None:
        """Fail if an update would be made from too little: `work` is the training that it comes from."""
        given = recipe.training
        length = f"steps = {given.steps}" if given.steps is not None else f"epochs = {given.epochs or 1}"
        told = f"(training.batch = {given.batch}, training.{length}; this device has {samples} training samples)"
        batch = min(work.batch or samples, samples)
        least = work.most if work.least is None else work.least
        steps = least if work.epochs is None else least * -(-samples // batch)
        for key, has, what in (
            ("least_batch", batch, f"makes a step from {batch}"),
            ("least_steps", steps, f"makes an update in {steps}"),
            ("least_samples", min(samples, steps * batch), f"makes an update from {min(samples, steps * batch)}"),
        ):
            if has < getattr(self, key):
                self._refuse(key, f"{whose} {what} {told}")

    def check_sent(
        self, going: dict[str, int], sums: bool, personal: tuple[str, ...], recipe: Recipe, whose: str
    ) -> None:
        """Fail if more would go than is agreed to: bytes up and down in a round, sums of inputs, fields of a state."""
        for way, size in going.items():
            for key in (f"most_{way}_mb", f"most_{way}_total_mb"):
                if (most := getattr(self, key)) is not None and size > most * MB:
                    self._refuse(key, f"{whose} has {size / MB:.3g} MB go {way} in a round")
        if sums and not self.sums:
            self._refuse("sums", f'{whose} has data.normalize = "{recipe.data.normalize}"')
        if personal and not self.personal:
            self._refuse("personal", f"{whose} has method.name = {recipe.method.name!r}, which sends its {personal[0]}")

    def within(self, size: int, way: str) -> int:
        """Return a number of bytes, or the most that may go up or down in a round."""
        most = getattr(self, f"most_{way}_mb")
        return size if most is None else min(size, int(most * MB))


class Traffic:
    """What has gone up and down from a device's directory, where its policy bounds that."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self._path, self._policy = folder / "traffic.json", policy
        self._most = {way: getattr(policy, f"most_{way}_total_mb") for way in ("up", "down")}
        known = read_json(self._path) if any(self._most.values()) and self._path.exists() else {}
        self._gone: dict[str, int] = {"up": 0, "down": 0, **known}

    def check(self, way: str, size: int) -> None:
        """Fail if so many bytes more are too many."""
        most, after = self._most[way], self._gone[way] + size
        if most is not None and after > most * MB:
            has = f"{self._gone[way] / MB:.3g} MB went {way} from {self._path.parent}, and {size / MB:.3g} MB are next"
            raise Failed(f"{self._policy.refusal(f'most_{way}_total_mb', has)}; this device leaves")

    def count(self, way: str, size: int) -> None:
        """Note that so many bytes go, before they do, if they may."""
        self.check(way, size)
        if self._most[way] is not None:
            self._gone[way] += size
            write_json(self._path, self._gone)


@dataclass(frozen=True)
class Guard:
    """A policy at work: bounds the time and the memory of what a recipe has done here."""

    policy: Policy
    traffic: Traffic
    most_bytes: int | None  # of the process

    @classmethod
    def of(cls, policy: Policy, folder: Path) -> Guard:
        """Return it for what is done from now on; the memory that the process has already does not count."""
        most = policy.most_memory_mb
        return cls(policy, Traffic(folder, policy), None if most is None else data_bytes() + most * MB)

    def run(self, work: Callable[[], T], what: str) -> T:
        """Return what some work returns; `what` names it if it takes too much, and is ended."""
        policy = self.policy
        late = policy.refusal("most_seconds", f"{what} took longer, and was ended")
        lacks = f"{what}: there is not enough memory for it"
        if self.most_bytes is not None:
            lacks = policy.refusal("most_memory_mb", f"{what} takes more, and was ended")
        return within_bytes(self.most_bytes, lambda: within_seconds(policy.most_seconds, work, late), lacks)

    def sends(self, size: int, what: str) -> None:
        """Fail if what is about to be sent is too large, and count it."""
        if size > self.policy.within(size, "up"):
            raise Failed(f"{self.policy.refusal('most_up_mb', f'{what} has {size / MB:.3g} MB')}; it was not sent")
        self.traffic.count("up", size)
