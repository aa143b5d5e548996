"""The record of a network: how to build it, as recipes and model files say it ("" there: an object of the user's)."""

from math import ceil, log2
from typing import Any, Self

from pydantic import model_validator

from personafl.core.net import Buffers
from personafl.core.shape import DataShape
from personafl.data.federated import FederatedData
from personafl.models.adapters import AdapterKind
from personafl.options import Named, Positive


class Network(Named):
    """A client's own network, all of it personal; further keys are the model's own options."""

    name: str = "auto"  # a name (see `personafl models`), "package.module:Name", or auto
    buffers: Buffers = "refused"  # what to do with running statistics: refused, shared or dropped

    @model_validator(mode="after")
    def _one_part(self) -> Self:
        if wrong := {"personal", "adapter", "adapter_size"} & self.options.keys():
            raise ValueError(f"a client's own network is personal as a whole; remove {', '.join(sorted(wrong))}")
        return self

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
    adapter_size: Positive = 16  # width of a bottleneck, rank of lora

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
