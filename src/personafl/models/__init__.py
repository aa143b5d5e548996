"""Models by name, by dotted path, or any `nn.Module` of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from personafl.core.net import Buffers, Net
from personafl.data.federated import FederatedData
from personafl.errors import BadInput, did_you_mean
from personafl.models import zoo
from personafl.options import checked, import_path, reason

__all__ = ["MODELS", "default_model", "make_net"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": zoo.linear,
    "mlp": zoo.mlp,
    "cnn": zoo.cnn,
    "bag": zoo.bag,
    "window": zoo.window,
}


def default_model(data: FederatedData) -> str:
    """Return a small model that fits the data."""
    if data.x.is_floating_point():
        return "mlp"
    return "bag" if data.y.ndim == 1 else "window"


def make_net(
    model: str | nn.Module, options: Mapping[str, Any], data: FederatedData, buffers: Buffers = "refused"
) -> Net:
    """Return the network for a dataset, tried on a few of its samples.

    `model` is a name, an `nn.Module`, or "package.module:Name" of one or of anything that returns one; whatever of
    `input_shape`, `classes` and `vocabulary` it takes is filled in from the data.
    """
    found = _find(model) if isinstance(model, str) else model
    if isinstance(found, nn.Module):
        if options and isinstance(model, str):  # an object replaces all that the recipe says of the model
            raise BadInput(f"model.{next(iter(options))}: a module that is made already takes no options; remove it")
        net = Net(found, buffers)
    else:
        known = found in MODELS.values()
        given = checked(found, options, "model", beside=["name", "buffers"]) if known else dict(options)
        net = Net(_maker(found, given, data, str(model)), buffers)
    _check_output(net, data)
    return net


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
    output = net.probe(data.x[:2])
    expected = torch.Size([*data.y[:2].shape, data.classes])
    if output.shape != expected:
        raise BadInput(
            f"model: its output for 2 samples has shape {list(output.shape)}, but this data needs {list(expected)} "
            f"({data.classes} classes)"
        )
