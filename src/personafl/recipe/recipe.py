"""Recipes: everything that decides a run, as validated TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from personafl.core.algorithm import Algorithm
from personafl.data.config import DataConfig
from personafl.errors import BadInput
from personafl.models.network import SharedNetwork
from personafl.options import Strict, check_numbers, explain
from personafl.recipe.attack import AttackSection
from personafl.recipe.cloud import BufferSection, CloudSection, check_buffer
from personafl.recipe.compare import TUNING_VALIDATION, CompareSection
from personafl.recipe.deploy import DeploySection
from personafl.recipe.devices import DeviceSection, check_devices
from personafl.recipe.engine import EngineSection
from personafl.recipe.evaluation import EvaluationSection
from personafl.recipe.fairness import FairnessSection
from personafl.recipe.federation import FederationSection
from personafl.recipe.method import MethodSection, PretrainSection, build_method
from personafl.recipe.privacy import PrivacySection, check_privacy, counted_alike
from personafl.recipe.robust import RobustSection, counted_alike_by_rules
from personafl.recipe.sample_privacy import SamplePrivacySection, check_sample_privacy
from personafl.recipe.secure import SecureSection, check_secure
from personafl.recipe.sweep import SweepSection, check_sweep
from personafl.recipe.training import TrainingSection
from personafl.recipe.values import digests_of, merged, nested, plain, put, read_toml, without_none
from personafl.uploads.codecs import LowRank, TopEntries, Whole

_WHOLE = ("name", "label", "seed", "data", "compare", "sweep", "deploy")  # keys that no one run can change


class Recipe(Strict):
    """A whole run."""

    name: str = "run"
    label: str | None = None  # what the tables call it; None: the method's name
    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Annotated[int, Field(ge=0)] = 50
    start: str | None = None  # directory of a finished run: start from its global model
    finetune: bool = False  # stage (c): after the last round every client fine-tunes its personal part
    data: DataConfig = DataConfig()
    model: SharedNetwork = SharedNetwork()
    training: TrainingSection = TrainingSection()
    federation: FederationSection = FederationSection()
    method: MethodSection = MethodSection()
    devices: tuple[DeviceSection, ...] = ()  # kinds of devices, if clients differ in them
    cloud: CloudSection | None = None  # several servers with devices of their own; None: one server
    buffer: BufferSection | None = None  # one server that does not wait for everyone; None: it does
    uplink: Annotated[Whole | TopEntries | LowRank, Field(discriminator="form")] = Whole()  # of the main stage
    privacy: PrivacySection | None = None  # of clients, from all who see what is sent down; None: there is none
    sample_privacy: SamplePrivacySection | None = None  # of single samples of a client; None: there is none
    secure: SecureSection | None = None  # of the main stage: sums alone are seen of uploads; None: each of them is
    robust: RobustSection | None = None  # what holds while some clients are hostile; None: the mean of uploads
    fairness: FairnessSection | None = None  # clients with a large loss count for more; None: they do not
    attack: AttackSection | None = None  # by some of the clients, simulated; None: all are honest
    pretrain: PretrainSection = PretrainSection()
    deploy: DeploySection | None = None  # devices and server as processes; None: simulated
    evaluation: EvaluationSection = EvaluationSection()
    engine: EngineSection = EngineSection()
    tracking: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ()  # metrics also to tensorboard, mlflow, wandb
    compare: CompareSection = CompareSection()
    sweep: SweepSection | None = None  # what `personafl sweep` tries

    @field_validator("name")
    @classmethod
    def _names_a_directory(cls, value: str) -> str:
        if not re.fullmatch(r"\w[\w.+-]*", value):
            raise ValueError("it names the run directory: use letters, digits, '-', '_', '+' and '.'")
        return value

    @model_validator(mode="before")
    @classmethod
    def _private_and_robust_uploads_count_alike(cls, values: Any) -> Any:
        return counted_alike_by_rules(counted_alike(values))

    @model_validator(mode="before")
    @classmethod
    def _text_in_the_tokens_of_the_model(cls, values: Any) -> Any:
        model, data = ((values.get(key) or {}) if isinstance(values, dict) else {} for key in ("model", "data"))
        source = model.get("source") if isinstance(model, dict) else None
        if isinstance(source, str) and isinstance(data, dict) and data.get("tokenizer") is None:
            values = {**values, "data": {**data, "tokenizer": source}}
        return values

    @model_validator(mode="before")
    @classmethod
    def _linear_ends_with_the_run(cls, values: Any) -> Any:
        training = values.get("training") if isinstance(values, dict) else None
        training = training if isinstance(training, dict) else {}
        schedule = training.get("schedule")
        if isinstance(schedule, dict) and schedule.get("kind") == "linear" and "rounds" not in schedule:
            rounds = values.get("rounds", cls.model_fields["rounds"].default)
            values = {**values, "training": {**training, "schedule": {**schedule, "rounds": rounds}}}
        return values

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "") -> Recipe:
        """Validate a recipe given as nested dicts; `where` is the file it came from."""
        try:
            given = plain(values)
            if not isinstance(given.get("devices", []), list):
                raise BadInput("devices: is a list of sections; write [[devices]], or devices=[{share=0.5, …}, …]")
            try:
                recipe = cls.model_validate(given)
            except ValidationError as error:
                raise explain(error, "", cls) from error
            check_numbers(given, recipe)
            check_devices(recipe.devices)
            if any(device.rank for device in recipe.devices):
                from personafl.recipe.rankchecks import check_ranks  # here, for few devices have one

                check_ranks(recipe)
            if recipe.cloud is not None:
                from personafl.recipe.cloudchecks import check_cloud  # here, for a device has no cloud

                check_cloud(recipe.cloud, recipe.federation.model_dump())
            check_buffer(recipe.buffer, recipe.federation.model_dump(), on_cloud=recipe.cloud is not None)
            check_privacy(recipe)
            check_sample_privacy(recipe)
            check_secure(recipe)
            if recipe.fairness is not None:
                from personafl.recipe.fairnesschecks import check_fairness  # here, for a device has none

                check_fairness(recipe)
            if recipe.robust is not None or recipe.attack is not None:
                from personafl.recipe.hostilechecks import check_attack, check_robust  # here, for a device has neither

                check_robust(recipe)
                check_attack(recipe)
            recipe.compare.check()
            check_sweep(recipe.sweep)
            if not recipe.rounds and recipe.start is None and not recipe.pretrain.rounds:
                raise BadInput("rounds: input should be greater than or equal to 1, or name a start to go on from")
        except BadInput as problem:
            raise BadInput(f"{where}: {problem}" if where else str(problem)) from problem
        return recipe

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Read and validate a recipe file."""
        return cls.parse(read_toml(path), str(path))

    @classmethod
    def kept(cls, path: Path) -> Recipe:
        """Read a recipe of a run directory, which must be as it was when the run began."""
        from personafl.storage.rundir import check_unchanged  # a device has no run directories

        check_unchanged(path)
        return cls.read(path)

    def check_installed(self) -> None:
        """Fail if it names code that personafl does not come with."""
        own = {f"devices[{at}].model": each.model for at, each in enumerate(self.devices) if each.model is not None}
        for key, section in {"method": self.method, "model": self.model, **own}.items():
            if ":" in section.name:
                why = "a device runs only what personafl comes with"
                raise BadInput(f"{key}.name: {section.name!r} is code of your own, and {why}; use personafl run")

    def algorithm(self) -> Algorithm:
        """Return the method with its options."""
        return build_method(self.method.name, self.method.options, self.training.build(), "method")

    def for_method(self, label: str, seed: int, tuned: Mapping[str, Any] | None = None) -> Recipe:
        """Return the recipe of one run of a comparison; `label` is a method or a variant, `tuned` has chosen values."""
        variant = self.compare.variants.get(label, {})
        method = variant.get("method", {}).get("name", label)
        own = self.method.options if self.method.name == method else {}
        base = self.model_dump(mode="json", exclude_none=True)
        base |= {"method": {"name": method, **own, **self.compare.options.get(method, {})}, "seed": seed, "compare": {}}
        base.pop("sweep", None)
        named = {"label": label} if variant else {}
        changes = nested(tuned or {})
        return Recipe.parse(
            merged(merged(base, variant), changes) | named, f"compare.variants.{label}" if variant else ""
        )

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """Return the recipe with some keys changed, and named by them; not with other data or another method."""
        values = self.model_dump(mode="json", exclude_none=True)
        for key, value in changes.items():
            if key.partition(".")[0] in _WHOLE or key == "method.name":
                raise BadInput(f"{key}: is the same in all runs that are compared; begin a new run to change it")
            put(values, key, plain(value))
        named = ", ".join(f"{key}={value}" for key, value in changes.items())
        return Recipe.parse({**values, "label": f"{self.label or self.method.name} ({named})"})

    def alone(self) -> Recipe:
        """Return the recipe as a comparison of its own method and seed alone."""
        return self.model_copy(update={"compare": CompareSection(methods=(self.method.name,), seeds=(self.seed,))})

    def for_pretraining(self) -> Recipe | None:
        """Return the recipe of stage (a), or None: the same data and network, without personal parts or devices.

        Its uploads are dense, and one server's rounds wait for all: a comparison does it once, for variants with
        whatever uplink, buffer and cloud.
        """
        if not self.pretrain.rounds:
            return None
        lora = ("rank", "alpha", "targets", "adapter_from", "adapter_sha256")
        own = dict.fromkeys(("personal", "adapter", "frozen", *lora))
        return self.model_copy(
            update={
                "rounds": self.pretrain.rounds,
                "method": self.pretrain.method,
                "training": self.pretrain.training or self.training,
                "model": self.model.model_copy(update=own),
                "devices": (),
                "federation": self.federation.model_copy(update={"offline": 0}),
                "uplink": Whole(),
                "buffer": None,
                "secure": None,
                "cloud": None,
                "pretrain": PretrainSection(),
                "deploy": None,
                "finetune": False,
            }
        )

    def started(self, run: Path) -> Recipe:
        """Return the recipe with stage (a) done, in the directory of that run."""
        return self.model_copy(update={"start": str(run.resolve()), "pretrain": PretrainSection()})

    def narrowed(
        self,
        methods: Sequence[str] | None,
        seeds: Sequence[int] | None,
        tune: int | None = None,
        pick: bool | None = None,
    ) -> Recipe:
        """Return the recipe with other methods and seeds to compare, trials to tune by, and whether one is picked.

        None keeps the recipe's.
        """
        values = self.compare.model_dump()
        values |= {"methods": list(methods)} if methods is not None else {}
        values |= {"seeds": list(seeds)} if seeds is not None else {}
        values |= {"tune": tune} if tune is not None else {}
        values |= {"pick": pick} if pick is not None else {}
        used = {self.compare.variants.get(m, {}).get("method", {}).get("name", m) for m in values["methods"]}
        values["options"] = {name: given for name, given in self.compare.options.items() if name in used}
        base = self.model_dump(mode="json", exclude_none=True)
        if values["tune"]:  # the runs train on what the trials did: with more data, chosen values can diverge
            base["data"]["validation"] = base["data"]["validation"] or TUNING_VALIDATION
            if self.pretrain.rounds:  # stage (a) is one for all, whatever learning rates are chosen
                base["pretrain"].setdefault("training", base["training"])
        return Recipe.parse({**base, "compare": values})

    def anchored(self) -> Recipe:
        """Return the recipe with whole paths, so that the run can be resumed from any folder."""
        changes: dict[str, Any] = {"model": self.model.anchored()}
        named = {"source": self.data.source, "tokenizer": self.data.tokenizer}
        paths = {key: Path(name).expanduser() for key, name in named.items() if name is not None}
        found = {key: str(path.resolve()) for key, path in paths.items() if path.exists()}
        changes["data"] = self.data.model_copy(update=found)
        changes["devices"] = tuple(
            each if each.model is None else each.model_copy(update={"model": each.model.anchored()})
            for each in self.devices
        )
        if self.cloud is not None:
            changes["cloud"] = self.cloud.anchored()
        if self.buffer is not None:
            changes["buffer"] = self.buffer.anchored()
        if self.start is not None:
            changes["start"] = str(Path(self.start).expanduser().resolve())
        return self.model_copy(update=changes)

    def evaluate_every(self) -> int:
        """Return the rounds between two scorings, 0 for none before the end."""
        return max(1, self.rounds // 10) if self.evaluation.every == "auto" else self.evaluation.every

    def digest(self) -> str:
        """Return the SHA-256 that names the recipe, for devices whose policy takes this one alone."""
        return digests_of(tomllib.loads(self.to_toml()))[0]

    def to_toml(self) -> str:
        """Return the whole recipe, defaults included."""
        none = set() if self.devices else {"devices"}  # after `devices = []` no [[devices]] may be added
        return tomli_w.dumps(without_none(self.model_dump(mode="json", exclude=none)))
