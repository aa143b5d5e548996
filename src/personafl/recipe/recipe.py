"""Recipes: everything that decides a run, as validated TOML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tomli_w
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from personafl.algorithms import METHODS
from personafl.algorithms.training import Training
from personafl.algorithms.uplink import LowRank, TopEntries, Whole
from personafl.core.algorithm import Algorithm
from personafl.core.batches import Steps
from personafl.core.net import Buffers
from personafl.core.optim import Accelerated, Adaptive, LocalOptimizer, Sgd
from personafl.core.schedule import Constant, Exponential, Linear, Step
from personafl.data.config import DataConfig
from personafl.errors import BadInput, did_you_mean
from personafl.models.adapters import AdapterKind
from personafl.options import Positive, Strict, checked, explain, import_path
from personafl.recipe.cloud import CloudSection, check_cloud
from personafl.recipe.deploy import DeploySection
from personafl.recipe.devices import DeviceSection, check_devices, check_each
from personafl.recipe.evaluation import EvaluationSection
from personafl.recipe.sweep import SweepSection, check_sweep
from personafl.recipe.values import merged, plain, without_none
from personafl.runs.tracking import SinkName
from personafl.simulate.buffer import BufferSection, check_buffer

NonNegative = Annotated[float, Field(ge=0)]


class ModelSection(Strict):
    """Which network; further keys are the model's own options."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", frozen=True)

    name: str = "auto"  # a name (see `personafl models`), "package.module:Name", or auto
    buffers: Buffers = "refused"  # what to do with running statistics: refused, shared or dropped
    personal: str | tuple[str, ...] | None = None  # a part (input, output, …) or patterns; None: as the method has it
    adapter: AdapterKind | None = None  # residual, bottleneck or lora; None: none, or what fits if personal = "adapter"
    adapter_size: Positive = 16  # width of a bottleneck, rank of lora


class TrainingSection(Strict):
    """How a client trains in a round, for every method."""

    optimizer: Literal["sgd", "adam", "accelerated"] = "sgd"  # accelerated: projected gradient that looks ahead
    lr: Annotated[float, Field(gt=0)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False
    box: Annotated[float, Field(gt=0)] | None = None  # of accelerated: weights stay in [−box, box]
    weight_decay: NonNegative = 0.0
    clip: Annotated[float, Field(gt=0)] | None = None  # gradient norm per step
    epochs: Positive | None = None  # passes over the client's data; 1 unless steps is given
    least_epochs: Positive | None = None  # then: drawn for each client and round, from this many up to epochs
    steps: Positive | None = None  # or a number of minibatches
    least_steps: Positive | None = None  # then: drawn for each client and round, from this many up to steps
    batch: Positive | Literal["all"] = 32
    schedule: Annotated[Constant | Exponential | Step | Linear, Field(discriminator="kind")] = Constant()

    @model_validator(mode="after")
    def _consistent(self) -> TrainingSection:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give either epochs or steps, not both")
        if self.optimizer == "adam" and (self.momentum or self.nesterov):
            raise ValueError("momentum and nesterov are for sgd; adam has its own")
        if self.optimizer == "accelerated" and (self.nesterov or not self.momentum):
            raise ValueError("accelerated needs momentum, such as 0.9, and has no nesterov")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum")
        if self.box is not None and self.optimizer != "accelerated":
            raise ValueError(f'box is for optimizer = "accelerated", not {self.optimizer}')
        if self.least_steps is not None and self.least_steps > (self.steps or 0):
            raise ValueError("least_steps needs steps, and may be at most that")
        if self.least_epochs is not None and self.least_epochs > (self.epochs or 0):
            raise ValueError("least_epochs needs epochs, and may be at most that")
        return self

    def build(self) -> Training:
        """Return it as the methods take it."""
        epochs = None if self.steps is not None else (self.epochs or 1)
        batch = None if self.batch == "all" else self.batch
        work = Steps(epochs=epochs, steps=self.steps, least=self.least_steps or self.least_epochs, batch=batch)
        common: dict[str, Any] = {key: getattr(self, key) for key in ("lr", "weight_decay", "clip", "schedule")}
        optimizer: LocalOptimizer
        if self.optimizer == "adam":
            optimizer = Adaptive(**common)
        elif self.optimizer == "accelerated":
            optimizer = Accelerated(momentum=self.momentum, box=self.box, **common)
        else:
            optimizer = Sgd(momentum=self.momentum, nesterov=self.nesterov, **common)
        return Training(work=work, optimizer=optimizer)


class FederationSection(Strict):
    """Who takes part in a round, and how uploads are weighted."""

    cohort: int | float = 1.0  # clients per round: a count, or a share of the seen clients
    sampling: Literal["exact", "bernoulli"] = "exact"
    weights: Literal["examples", "uniform"] = "examples"
    offline: int | float = 0  # others that train without contact in a round: a count, or a share of the seen clients

    @field_validator("offline")
    @classmethod
    def _none_or_some(cls, value: int | float) -> int | float:
        if not 0 <= value <= (1 if isinstance(value, float) else value):
            raise ValueError("give a count, a share up to 1.0, or 0 for nobody")
        return value

    @field_validator("cohort")
    @classmethod
    def _count_or_share(cls, value: int | float) -> int | float:
        if not (value >= 1 if isinstance(value, int) else 0 < value <= 1):
            raise ValueError("give a count of at least 1, or a share above 0 and up to 1.0")
        return value

    def size(self, clients: int) -> int:
        """Return the cohort's size for a population."""
        for key in ("cohort", "offline"):
            value = getattr(self, key)
            if isinstance(value, int) and value > clients:
                raise BadInput(
                    f"federation.{key}: {value} clients a round, but only {clients} take part in training; "
                    "lower it, or give a share such as 0.5"
                )
        return self.cohort if isinstance(self.cohort, int) else max(1, round(self.cohort * clients))

    def check_offline(self, algorithm: Algorithm) -> None:
        """Fail if clients are to train without contact under a method that does not say how."""
        if self.offline and getattr(algorithm.client, "offline", None) is None:
            raise BadInput(
                f"federation.offline: {algorithm.name}'s clients train only in contact; remove it (given: "
                f"{self.offline}), or in a comparison leave it to others: compare.variants.NAME.federation.offline"
            )


class MethodSection(Strict):
    """Which method; further keys are the method's own options."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", frozen=True)

    name: str = "fedavg"


class PretrainSection(Strict):
    """Stage (a): train a shared model first, without personal parts or adapters, and start from it."""

    rounds: Annotated[int, Field(ge=0)] = 0  # 0: no such stage
    method: MethodSection = MethodSection()
    training: TrainingSection | None = None  # None: as in the main stage


class CompareSection(Strict):
    """What `personafl compare` runs: methods × seeds.

    `options.NAME` are a method's own options. `variants.NAME` names a changed recipe: its values replace the recipe's,
    and NAME can stand among the methods.
    """

    methods: tuple[str, ...] = ("fedavg", "local", "finetune", "ditto")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @field_validator("methods", "seeds")
    @classmethod
    def _distinct(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not values:
            raise ValueError("give at least one")
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"{twice[0]!r} is there twice")
        return values

    def check(self) -> None:
        """Fail if a method or one of its options does not exist."""
        for name in self.methods:
            if name not in self.variants:
                find_method(name, "compare.methods", self.variants)
        for name, options in self.options.items():
            checked(find_method(name, "compare.options"), options, f"compare.options.{name}")


class EngineSection(Strict):
    """How the simulator works; none of it changes results beyond rounding."""

    strategy: Literal["auto", "graphs", "stacked", "sequential"] = "auto"
    device: str = "auto"  # auto: cuda if there is one
    dtype: Literal["float32", "float64", "tf32", "bfloat16"] = "float32"  # of products: tf32 (GPU) and bfloat16
    memory_mb: Positive = 1024  # for clients trained at the same time
    data_mb: Positive | None = None  # for data on a GPU; more are brought there by parts. None: half of what is free
    store_mb: Positive = 1024  # for personal states kept in memory; the others are on disk
    checkpoint_seconds: NonNegative = 10.0  # at most this much work is lost in a crash; 0: every round
    threads: Positive | None = None  # of torch; None: torch decides
    workers: Positive | Literal["auto"] = "auto"  # processes that train, on a CPU; auto: one per core if it pays

    @field_validator("device")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", value):
            raise ValueError("input should be auto, cpu, cuda, cuda:1, … or mps")
        return value


class Recipe(Strict):
    """A whole run."""

    name: str = "run"
    label: str | None = None  # what the tables call it; None: the method's name
    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Annotated[int, Field(ge=0)] = 50
    start: str | None = None  # directory of a finished run: start from its global model
    finetune: bool = False  # stage (c): after the last round every client fine-tunes its personal part
    data: DataConfig = DataConfig()
    model: ModelSection = ModelSection()
    training: TrainingSection = TrainingSection()
    federation: FederationSection = FederationSection()
    method: MethodSection = MethodSection()
    devices: tuple[DeviceSection, ...] = ()  # kinds of devices, if clients differ in them
    cloud: CloudSection | None = None  # several servers with devices of their own; None: one server
    buffer: BufferSection | None = None  # one server that does not wait for everyone; None: it does
    uplink: Annotated[Whole | TopEntries | LowRank, Field(discriminator="form")] = Whole()  # of the main stage
    pretrain: PretrainSection = PretrainSection()
    deploy: DeploySection | None = None  # devices and server as processes; None: simulated
    evaluation: EvaluationSection = EvaluationSection()
    engine: EngineSection = EngineSection()
    tracking: tuple[SinkName, ...] = ()  # also write metrics to: tensorboard, mlflow, wandb
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
            check_each(given.get("devices", []))
            try:
                recipe = cls.model_validate(given)
            except ValidationError as error:
                raise explain(error, "", cls) from error
            check_devices(recipe.devices)
            check_cloud(recipe.cloud, recipe.federation.model_dump())
            check_buffer(recipe.buffer, recipe.federation.model_dump(), on_cloud=recipe.cloud is not None)
            recipe.compare.check()
            check_sweep(recipe.sweep)
            if not recipe.rounds and recipe.start is None and not recipe.pretrain.rounds:
                raise BadInput("rounds: input should be greater than or equal to 1, or name a start to go on from")
        except BadInput as problem:
            raise BadInput(f"{where}: {problem}" if where else str(problem)) from problem
        return recipe

    def algorithm(self) -> Algorithm:
        """Return the method with its options."""
        return build_method(self.method.name, self.method.model_extra or {}, self.training.build(), "method")

    def for_method(self, label: str, seed: int) -> Recipe:
        """Return the recipe of one run of a comparison; `label` is a method or a variant."""
        variant = self.compare.variants.get(label, {})
        method = variant.get("method", {}).get("name", label)
        own = (self.method.model_extra or {}) if self.method.name == method else {}
        base = self.model_dump(mode="json", exclude_none=True)
        base |= {"method": {"name": method, **own, **self.compare.options.get(method, {})}, "seed": seed, "compare": {}}
        base.pop("sweep", None)
        named = {"label": label} if variant else {}
        return Recipe.parse(merged(base, variant) | named, f"compare.variants.{label}" if variant else "")

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
        own = {"personal": None, "adapter": None}
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
                "cloud": None,
                "pretrain": PretrainSection(),
                "deploy": None,
                "finetune": False,
            }
        )

    def started(self, run: Path) -> Recipe:
        """Return the recipe with stage (a) done, in the directory of that run."""
        return self.model_copy(update={"start": str(run.resolve()), "pretrain": PretrainSection()})

    def narrowed(self, methods: Sequence[str] | None, seeds: Sequence[int] | None) -> Recipe:
        """Return the recipe with other methods and seeds to compare; None keeps the recipe's."""
        values = self.compare.model_dump()
        values |= {"methods": list(methods)} if methods is not None else {}
        values |= {"seeds": list(seeds)} if seeds is not None else {}
        used = {self.compare.variants.get(m, {}).get("method", {}).get("name", m) for m in values["methods"]}
        values["options"] = {name: given for name, given in self.compare.options.items() if name in used}
        return Recipe.parse({**self.model_dump(mode="json", exclude_none=True), "compare": values})

    def anchored(self) -> Recipe:
        """Return the recipe with whole paths, so that the run can be resumed from any folder."""
        changes: dict[str, Any] = {}
        source = Path(self.data.source).expanduser()
        if source.exists():
            changes["data"] = self.data.model_copy(update={"source": str(source.resolve())})
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

    def to_toml(self) -> str:
        """Return the whole recipe, defaults included."""
        none = set() if self.devices else {"devices"}  # after `devices = []` no [[devices]] may be added
        return tomli_w.dumps(without_none(self.model_dump(mode="json", exclude=none)))


def build_method(name: str, options: Mapping[str, Any], training: Training, where: str) -> Algorithm:
    """Return a method by name with the options that a recipe gives."""
    build = find_method(name, f"{where}.name")
    algorithm = build(training, **checked(build, options, where, beside=["name"]))
    if not isinstance(algorithm, Algorithm):
        raise BadInput(f"{where}.name: {name!r} made a {type(algorithm).__name__}, not an Algorithm")
    return algorithm


def find_method(name: str, where: str, beside: Iterable[str] = ()) -> Callable[..., Algorithm]:
    """Return what builds a method: one of ours by name, or the user's own as package.module:name."""
    if name in METHODS:
        return METHODS[name].build
    if ":" not in name:
        raise BadInput(f"{where}: no method {name!r}; {did_you_mean(name, [*METHODS, *beside])}")
    found: Callable[..., Algorithm] = import_path(name, where)
    return found
