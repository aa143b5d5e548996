"""Networks called in fewer passes over memory."""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.pooling import _MaxPoolNd

from personafl.core.net import Net
from personafl.fast.bfloat16 import rounding
from personafl.fast.layers import Layers, entered
from personafl.fast.stack import stack_around, transformed


class _Facts:
    """What is known of a network's module."""

    def __init__(self, net: Net) -> None:
        self.module = net._module
        for layer in self.module.modules():
            if type(layer) is nn.Sequential:
                layer.__class__ = PoolFirst
        self.places = _places(self.module)
        self.grouped = any(isinstance(m, nn.GroupNorm) for m in self.module.modules())
        self.apart = False  # whether samples of several clients may be one batch
        if getattr(self.module, "apart", False):
            from personafl.fast.folded import folds  # few devices have such a network

            self.apart = folds(net, self.places)
        self.writes: bool | None = None  # whether it changes its input in place; None: not tried yet


_KNOWN: weakref.WeakKeyDictionary[Net, _Facts] = weakref.WeakKeyDictionary()


def called(net: Net, values: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return what `Net.called` does: its places looked up once, and inputs copied only if the module writes into them.

    On a CPU images have their channels last: what convolutions and pooling are fastest with there.
    """
    facts = _KNOWN.get(net)
    if facts is None:
        facts = _KNOWN[net] = _Facts(net)
    if facts.apart and (stack_around() or not transformed()):
        from personafl.fast.folded import called_as_one

        return called_as_one(net, values, x, functools.partial(_put, facts))
    if net.convolutional and _channels_last(facts, x):
        x = x.to(memory_format=torch.channels_last)
    if facts.writes is not False:  # samples are another's: the next step's, or the next model's
        x = x.clone()
    with _put(facts, values), _layers(x):
        output: Tensor = facts.module(x)
    if facts.writes is None and not transformed():
        facts.writes = x._version > 0
    return output


@contextlib.contextmanager
def _put(facts: _Facts, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Have values in their places of the module until left."""
    places = [(table, local, value) for name, value in values.items() for table, local in facts.places[name]]
    before = [table[local] for table, local, _ in places]
    try:
        for table, local, value in places:
            table[local] = value
        yield
    finally:
        for (table, local, _), old in zip(places, before, strict=True):
            table[local] = old


def _layers(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return what computes layers on a GPU where no gradient is taken of them: there `Layers` is not entered yet."""
    stack = stack_around() if x.device.type == "cuda" else None
    return contextlib.nullcontext() if stack is None or entered() else Layers(stack, {}, factored=False)


def _channels_last(facts: _Facts, x: Tensor) -> bool:
    """Say whether images have their channels last. GroupNorm is several times slower so in bfloat16."""
    if x.ndim != 4 or x.device.type != "cpu" or transformed():
        return False
    return not (facts.grouped and rounding(x))


def _places(module: nn.Module) -> dict[str, list[tuple[dict[str, Tensor | None], str]]]:
    """Return {name of a parameter or buffer: the tables of modules that hold it, and its name there}.

    A parameter that is used under several names goes by its first one, and is held in several places.
    """
    found: dict[str, list[tuple[dict[str, Tensor | None], str]]] = {}
    first: dict[int, str] = {}
    for prefix, layer in module.named_modules():
        for table in (layer._parameters, layer._buffers):
            for local, value in table.items():
                name = f"{prefix}.{local}".lstrip(".")
                if value is not None:
                    name = first.setdefault(id(value), name)
                found.setdefault(name, []).append((table, local))
    return found


class PoolFirst(nn.Sequential):
    """Calls each ReLU after the max-pooling that follows it: the same values and gradients, from a fraction of them.

    Its layers stay in their order for whoever calls them one by one, or some of them: a `forward()` may look at what is
    between. A ReLU that writes into the input of all the layers stays: others may see that.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Call the layers."""
        layers = list(self._modules.values())
        for place, following in itertools.pairwise(range(len(layers))):
            layer, pool = layers[place], layers[following]
            if type(layer) is not nn.ReLU or (layer.inplace and not place) or _watched(layer) or _watched(pool):
                continue
            if isinstance(pool, _MaxPoolNd) and not pool.return_indices:
                layers[place], layers[following] = pool, layer
        for layer in layers:
            assert layer is not None
            x = layer(x)
        return x


def _watched(layer: nn.Module | None) -> bool:
    """Say whether a hook looks at what goes through a layer."""
    return layer is not None and bool(layer._forward_hooks or layer._forward_pre_hooks)
