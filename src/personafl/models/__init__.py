"""Models by name, by dotted path, or any `nn.Module` of the user's."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from personafl.core.losses import ctc_frames
from personafl.core.net import Buffers, Net
from personafl.core.split import Split
from personafl.data.federated import FederatedData
from personafl.errors import BadInput, did_you_mean
from personafl.models import additive, convolutional, transformer, zoo
from personafl.models.adapters import AdapterKind, Site, default_adapter, with_adapters
from personafl.models.parts import needs_adapter, personal_split
from personafl.options import checked, import_path, reason

__all__ = [
    "MODELS",
    "AdapterKind",
    "Site",
    "default_adapter",
    "default_model",
    "make_net",
    "make_net_and_split",
    "personal_split",
    "with_adapters",
]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": zoo.linear,
    "mlp": zoo.mlp,
    "cnn": zoo.cnn,
    "lenet": convolutional.lenet,
    "cnn1": convolutional.cnn1,
    "cnn2": convolutional.cnn2,
    "resnet18": convolutional.resnet18,
    "resnet20": convolutional.resnet20,
    "resnet32": convolutional.resnet32,
    "bag": zoo.bag,
    "window": zoo.window,
    "transformer": transformer.transformer,
    "speech": transformer.speech,
    "additive": additive.additive,
    "split_input": additive.split_input,
}


def default_model(data: FederatedData) -> str:
    """Return a small model that fits the data."""
    if data.task == "ctc":
        return "speech"
    if data.x.is_floating_point():
        return "mlp"
    return "bag" if data.y.ndim == 1 else "window"


def make_net(
    model: str | nn.Module,
    options: Mapping[str, Any],
    data: FederatedData,
    buffers: Buffers = "refused",
    *,
    adapter: AdapterKind | None = None,
    adapter_size: int = 16,
) -> Net:
    """Return the network for a dataset, tried on a few of its samples.

    `model` is a name, an `nn.Module`, or "package.module:Name" of one or of anything that returns one; whatever of
    `input_shape`, `classes` and `vocabulary` it takes is filled in from the data. `adapter` puts adapters into it.
    """
    return make_net_and_split(model, options, data, buffers, adapter=adapter, adapter_size=adapter_size)[0]


def make_net_and_split(
    model: str | nn.Module,
    options: Mapping[str, Any],
    data: FederatedData,
    buffers: Buffers = "refused",
    personal: str | Sequence[str] | None = None,
    adapter: AdapterKind | None = None,
    adapter_size: int = 16,
) -> tuple[Net, Split | None]:
    """Return the network as `make_net` does, and which of its parameters are `personal` (see `models.parts`).

    Where "adapter" is personal and the model has none, the adapters that suit it are put in.
    """
    base = _source(model, options, data)
    make = base if adapter is None else _adapted(base, adapter, adapter_size)
    split = None
    if personal is not None:
        module = _example(make)
        if adapter is None and needs_adapter(module, personal):
            make = _adapted(base, default_adapter(module), adapter_size)
            module = _example(make)
        split = personal_split(module, personal)
    net = Net(make, buffers)
    _check_output(net, data)
    return net, split


Source = nn.Module | Callable[[], nn.Module]


def _source(model: str | nn.Module, options: Mapping[str, Any], data: FederatedData) -> Source:
    """Return the module that was given, or what makes it."""
    found = _find(model) if isinstance(model, str) else model
    if isinstance(found, nn.Module):
        if options and isinstance(model, str):  # an object replaces all that the recipe says of the model
            raise BadInput(f"model.{next(iter(options))}: a module that is made already takes no options; remove it")
        return found
    known = found in MODELS.values()
    beside = ["name", "buffers", "personal", "adapter", "adapter_size"]
    given = checked(found, options, "model", beside=beside) if known else dict(options)
    return _maker(found, given, data, str(model))


def _adapted(source: Source, kind: AdapterKind, size: int) -> Callable[[], nn.Module]:
    """Return what makes the module with adapters; a module that is made already keeps its weights, only they are drawn.

    The module is drawn before its adapters, so with equal seeds it starts like the one without.
    """

    def make() -> nn.Module:
        return with_adapters(source if isinstance(source, nn.Module) else source(), kind, size=size)

    return make


def _example(source: Source) -> nn.Module:
    """Return a module to look at; torch's generator is left as it was."""
    if isinstance(source, nn.Module):
        return source
    with torch.random.fork_rng(devices=[]):
        return source()


def _find(name: str) -> Callable[..., nn.Module] | nn.Module:
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        raise BadInput(
            f"model.name: no model {name!r}; {did_you_mean(name, MODELS)}; your own is written package.module:Name"
        )
    found: Callable[..., nn.Module] | nn.Module = import_path(name, "model.name")
    return found


def _maker(
    build: Callable[..., nn.Module], options: dict[str, Any], data: FederatedData, name: str
) -> Callable[[], nn.Module]:
    shape = tuple(data.x.shape[1:])
    facts: dict[str, Any] = {"input_shape": shape, "classes": data.classes}
    if not data.x.is_floating_point():
        facts["vocabulary"] = data.vocabulary or int(data.x.max()) + 1
    takes = inspect.signature(build).parameters
    if "vocabulary" in takes and "vocabulary" not in {*facts, *options}:
        raise BadInput(f"model.name: {name!r} is for text, but this data has inputs of shape {list(shape)}; use mlp")
    given = {key: value for key, value in facts.items() if key in takes} | options
    try:
        inspect.signature(build).bind(**given)
    except TypeError as error:
        raise BadInput(f"model: {name!r} cannot be built with {', '.join(given) or 'no options'}: {error}") from error

    def make() -> nn.Module:
        try:
            module = build(**given)
        except Exception as error:  # it may be the user's code
            raise BadInput(
                f"model: {name!r} cannot be built for inputs of shape {list(shape)}: {reason(error)}"
            ) from error
        if not isinstance(module, nn.Module):
            raise BadInput(f"model: {name!r} made {type(module).__name__}, not an nn.Module")
        return module

    return make


def _check_output(net: Net, data: FederatedData) -> None:
    shape = list(net.probe(data.x[:2]).shape)
    needs = [*data.y[:2].shape, data.classes]
    wanted, classes = str(needs), f"{data.classes} classes"
    if data.task == "ctc":  # as many frames as the model likes, if every target can be aligned with them
        least = int(ctc_frames(data.y).max())
        wanted, classes = f"[{needs[0]}, frames, {needs[2]}]", f"{classes}, at least {least} frames"
        needs[1] = max([least, *shape[1:2]])
    if shape != needs:
        raise BadInput(
            f"model: its output for {needs[0]} samples has shape {shape}, but this data needs {wanted} ({classes})"
        )
