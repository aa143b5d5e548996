"""The record of a network: how to build it, as recipes and model files say it ("" there: an object of the user's)."""

from math import ceil, log2
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import nn

from personafl.core.net import Buffers
from personafl.core.shape import DataShape
from personafl.data.federated import FederatedData
from personafl.errors import BadInput
from personafl.models.adapters import AdapterKind, with_adapters
from personafl.options import Named, Positive


class Network(Named):
    """A client's own network, all of it personal; further keys are the model's own options."""

    name: str = "auto"  # a name (see `personafl models`), "package.module:Name", or auto
    buffers: Buffers = "refused"  # what to do with running statistics: refused, shared or dropped

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_source(cls, values: Any) -> Any:
        if isinstance(values, dict) and "source" in values and values.get("name", "auto") == "auto":
            return {**values, "name": "pretrained"}
        return values

    @model_validator(mode="after")
    def _one_part(self) -> Self:
        if wrong := SharedNetwork.model_fields.keys() - Network.model_fields.keys() & self.options.keys():
            raise ValueError(f"a client's own network is personal as a whole; remove {', '.join(sorted(wrong))}")
        return self

    def anchored(self) -> Self:
        """Return it with a pretrained model's whole path, and which one that is: no other is taken in its place."""
        if self.name != "pretrained" or "source" not in self.options:
            return self
        from personafl.models.pretrained import base_folder, fingerprint  # few devices have one

        folder = base_folder(self.options["source"])
        known = {"source": str(folder), "sha256": self.options.get("sha256") or fingerprint(folder)}
        return type(self)(**self.model_dump(exclude_unset=True) | known)

    def resolved(self, data: FederatedData) -> Self:
        """Return it with the name and the options that "auto" stands for; options that are given stay."""
        if self.name != "auto":
            return self
        chosen = default_model(data.shape)
        return type(self)(**{**chosen.options, **self.model_dump(exclude_unset=True), "name": chosen.name})


class SharedNetwork(Network):
    """Which network, a part of which may be personal; further keys are the model's own options."""

    personal: str | tuple[str, ...] | None = None  # a part (input, output, …) or patterns; None: as the method has it
    adapter: AdapterKind | None = None  # residual, bottleneck or lora; None: none, or what fits if personal = "adapter"
    adapter_size: Positive = 16  # width of a bottleneck, and lora's rank where there is no other
    rank: Positive | None = None  # of lora; None: adapter_size
    alpha: Annotated[float, Field(gt=0)] | None = None  # lora is scaled by alpha / rank; None: by 1
    adapters: Literal[1, 2] = 1  # of lora at a layer: two are added up, and the second is the part "lora_local"
    targets: tuple[str, ...] | None = None  # layers with an adapter; None: all that it fits, see docs/adapters.md
    frozen: str | tuple[str, ...] | None = None  # parts or patterns that are not trained, besides a pretrained model
    adapter_from: str | None = None  # folder that peft wrote, whose adapters training starts from
    adapter_sha256: str | None = None  # of its files; None: any

    @field_validator("targets", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _of_lora(self) -> Self:
        given = [key for key in ("rank", "alpha", "targets", "adapter_from") if getattr(self, key) is not None]
        given += ["adapters"] if self.adapters == 2 else []
        if given and self.adapter != "lora":
            raise ValueError(f'{", ".join(given)} is of lora adapters; set model.adapter = "lora", or remove it')
        return self

    def anchored(self) -> Self:
        """Return it so that nothing else takes the place of what it names; with what `adapter_from` says of itself."""
        record = super().anchored()
        if self.adapter_from is None:
            return record
        from personafl.models.peftfolder import same, told

        known = told(self.adapter_from)
        for key, value in known.items():
            if getattr(self, key) not in (None, value):
                raise BadInput(f"model.{key}: is {value} in {self.adapter_from}; remove it here, or set it to that")
        whole = str(Path(self.adapter_from).expanduser().resolve())
        known |= {"adapter_from": whole, "adapter_sha256": same(whole, self.adapter_sha256)}
        return record.model_copy(update=known)

    def adapted(self, module: nn.Module, kind: AdapterKind) -> nn.Module:
        """Return a copy of a module with adapters of a kind, as the record has them."""
        size = self.adapter_size if self.rank is None else self.rank
        if self.adapter_from is None:
            return with_adapters(module, kind, size=size, alpha=self.alpha, targets=self.targets, count=self.adapters)
        from personafl.models.peftfolder import put_in, same, told

        if self.rank is None:
            return self.model_copy(update=told(self.adapter_from)).adapted(module, kind)
        same(self.adapter_from, self.adapter_sha256)
        made = with_adapters(module, kind, size=size, alpha=self.alpha, targets=self.targets, count=self.adapters)
        put_in(made, self.adapter_from)
        return made

    @property
    def whole(self) -> Network:
        """The same network with no part that is apart."""
        return Network(name=self.name, buffers=self.buffers, **self.options)


def default_model(shape: DataShape) -> Network:
    """Return a small network for the shape of a sample: what "auto" stands for.

    Each has norms, without which convolutions hardly start under plain SGD and FedBN has no personal part, and weights
    between its first and its last layer, which are what QuPeD quantizes.
    """
    if shape.task == "ctc":
        return Network(name="speech")
    options: dict[str, Any] = {"norm": True}
    if shape.vocabulary is not None:
        return (
            Network(name="window", **options)
            if shape.target_shape
            else Network(name="bag", **options | {"hidden": (64,)})
        )
    _, *places = shape.input_shape
    if len(places) in (1, 2) and min(places) >= 4:
        name, few, widths = ("cnn", 8, (16, 32)) if len(places) == 2 else ("cnn1d", 16, (32, 64))
        # Halved until few places are left, so that the layer after them is no larger for larger inputs.
        halvings = min(max(2, ceil(log2(max(places) / few))), int(log2(min(places))))
        return Network(name=name, **options | {"channels": (*widths, *[64] * (halvings - 2))})
    return Network(name="mlp", **options | {"hidden": (64, 64)})
