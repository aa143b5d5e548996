"""The record of a network: how to build it, as recipes and model files say it ("" there: an object of the user's)."""

from typing import Self

from pydantic import model_validator

from personafl.core.net import Buffers
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
        """Return it with the name that "auto" stands for."""
        return self.model_copy(update={"name": default_model(data)}) if self.name == "auto" else self


class SharedNetwork(Network):
    """Which network, a part of which may be personal; further keys are the model's own options."""

    personal: str | tuple[str, ...] | None = None  # a part (input, output, …) or patterns; None: as the method has it
    adapter: AdapterKind | None = None  # residual, bottleneck or lora; None: none, or what fits if personal = "adapter"
    adapter_size: Positive = 16  # width of a bottleneck, rank of lora

    @property
    def whole(self) -> Network:
        """The same network with no part that is apart."""
        return Network(name=self.name, buffers=self.buffers, **self.options)


def default_model(data: FederatedData) -> str:
    """Return a small model that fits the data."""
    if data.task == "ctc":
        return "speech"
    if data.x.is_floating_point():
        return "mlp"
    return "bag" if data.y.ndim == 1 else "window"
