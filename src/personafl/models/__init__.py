"""Models by name, by dotted path, or any `nn.Module` of the user's."""

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from personafl.core.net import Net, copied
from personafl.core.split import Split
from personafl.data.federated import FederatedData
from personafl.errors import BadInput, did_you_mean
from personafl.fast.trial import try_stacked
from personafl.models.adapters import AdapterKind, Site, default_adapter, with_adapters
from personafl.models.network import Network, SharedNetwork, default_model
from personafl.models.parts import needed_adapter, parts_named, personal_split
from personafl.options import checked, import_path, users_code

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

_HOMES = {
    "linear": "zoo.linear",
    "mlp": "zoo.mlp",
    "cnn": "zoo.cnn",
    "cnn1d": "zoo.cnn1d",
    "lenet": "convolutional.lenet",
    "cnn0": "convolutional.cnn0",
    "cnn1": "convolutional.cnn1",
    "cnn2": "convolutional.cnn2",
    "resnet18": "convolutional.resnet18",
    "resnet20": "convolutional.resnet20",
    "resnet32": "convolutional.resnet32",
    "bag": "zoo.TextBag",
    "window": "zoo.TextWindow",
    "transformer": "transformer.LanguageModel",
    "speech": "transformer.SpeechModel",
    "additive": "additive.Additive",
    "split_input": "additive.SplitInput",
    "pretrained": "pretrained.Pretrained",
}


class _Models(Mapping[str, Callable[..., nn.Module]]):
    """What builds each model; its file is imported when the model is asked for."""

    def __getitem__(self, name: str) -> Callable[..., nn.Module]:
        found: Callable[..., nn.Module] = pkgutil.resolve_name(f"{__name__}.{_HOMES[name]}")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


MODELS = _Models()


def make_net(network: Network, data: FederatedData, module: nn.Module | None = None) -> Net:
    """Return a network for a dataset, tried on a few of its samples; `module` replaces what the record names.

    Whatever of `input_shape`, `classes` and `vocabulary` the named one takes is filled in from the data.
    """
    return _tried(_source(network, data, module), network, data)


def make_net_and_split(
    network: SharedNetwork, data: FederatedData, module: nn.Module | None = None
) -> tuple[Net, Split | None]:
    """Return a network as `make_net` does, with its adapters, and which parameters are personal (see `models.parts`).

    Where "adapter" is personal and the model has none, the adapters that suit it are put in.
    """
    base = _source(network, data, module)
    kind, split = network.adapter, None
    if kind is None and network.personal is not None:
        kind = needed_adapter(_example(base), network.personal)
    if network.options.get("checkpoint") and kind is None and network.name == "pretrained":
        raise BadInput(
            'model.checkpoint: is for adapters beside a frozen model; set model.adapter = "lora", or remove it'
        )
    make = base if kind is None else _adapted(base, network, kind)
    if network.frozen:
        make = _frozen(make, network.frozen)
    if network.personal is not None:
        split = personal_split(_example(make), network.personal)
    return _tried(make, network, data), split


Source = nn.Module | Callable[[], nn.Module]


def _source(network: Network, data: FederatedData, module: nn.Module | None) -> Source:
    """Return the module that was given, or what makes it."""
    if module is not None:  # it replaces all that the record says of the model
        lazy = [name for name, value in module.named_parameters() if is_lazy(value)]
        if lazy:
            raise BadInput(f"model: {lazy[0]} has no shape yet; call the model once, on a few samples, first")
        return module
    found = _find(network.name)
    if isinstance(found, nn.Module):
        for name in network.options:
            raise BadInput(f"model.{name}: a module that is made already takes no options; remove it")
        return found
    known = network.name in MODELS
    beside = type(network).model_fields
    given = checked(found, network.options, "model", beside=beside) if known else dict(network.options)
    return _maker(found, given, data, network.name)


def _adapted(source: Source, network: SharedNetwork, kind: AdapterKind) -> Callable[[], nn.Module]:
    """Return what makes the module with adapters; a module that is made already keeps its weights, only they are drawn.

    The module is drawn before its adapters, so with equal seeds it starts like the one without. A pretrained one is
    frozen.
    """

    def make() -> nn.Module:
        module = source if isinstance(source, nn.Module) else source()
        if network.name == "pretrained":
            from personafl.models.pretrained import Pretrained  # few devices have one

            assert isinstance(module, Pretrained)
            module.freeze()
        return network.adapted(module, kind)

    return make


def _frozen(source: Source, parts: str | Sequence[str]) -> Source:
    """Return the module, or what makes it, with parts of it as constants."""

    def frozen(module: nn.Module) -> nn.Module:
        constant = parts_named(module, parts, "model.frozen")
        for name, value in module.named_parameters():
            value.requires_grad_(value.requires_grad and not constant.is_personal(name))
        return module

    return frozen(copied(source, [])) if isinstance(source, nn.Module) else lambda: frozen(source())


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
    facts = data.shape.model_dump(include={"input_shape", "classes", "vocabulary", "task"}, exclude_none=True)
    shape = list(data.shape.input_shape)
    takes = inspect.signature(build).parameters
    if "vocabulary" in takes and "vocabulary" not in {*facts, *options}:
        raise BadInput(f"model.name: {name!r} is for text, but this data has inputs of shape {shape}; use mlp")
    given = {key: value for key, value in facts.items() if key in takes} | options
    try:
        inspect.signature(build).bind(**given)
    except TypeError as error:
        raise BadInput(f"model: {name!r} cannot be built with {', '.join(given) or 'no options'}: {error}") from error

    def make() -> nn.Module:
        with users_code(f"model: {name!r} cannot be built for inputs of shape {shape}"):
            module = build(**given)
        if not isinstance(module, nn.Module):
            raise BadInput(f"model: {name!r} made {type(module).__name__}, not an nn.Module")
        return module

    return make


def _tried(make: Source, network: Network, data: FederatedData) -> Net:
    """Return what makes a module as a network; fail if its output does not fit the data."""
    name = type(make).__name__ if isinstance(make, nn.Module) else network.name
    with users_code(f"model: {name!r} cannot be used"):
        net = Net(make, network.buffers)
    shape = list(net.probe(data.x[:2]).shape)
    try_stacked(net, data.x[:2])
    needs = [*data.y[:2].shape, data.classes] if data.shape.whole else list(data.y[:2].shape)
    wanted, classes = str(needs), f"{data.classes} {data.shape.counted}"
    if data.task == "ctc":  # as many frames as the model likes, if every target can be aligned with them
        from personafl.core.ctc import ctc_frames

        least = int(ctc_frames(data.y).max())
        wanted, classes = f"[{needs[0]}, frames, {needs[2]}]", f"{classes}, at least {least} frames"
        needs[1] = max([least, *shape[1:2]])
    if shape != needs:
        raise BadInput(
            f"model: its output for {needs[0]} samples has shape {shape}, but this data needs {wanted} ({classes})"
        )
    return net
