"""Samples of many clients through a network as one batch, without vmap: adapters beside a frozen model.

What constants alone compute is the same function for all clients. If a module's output for a sample depends on no other
sample (it says so: `apart`), those of all clients [clients · batch, …] go through it as if they were one client's, in
torch's own kernels, and only the linear layers that clients have of their own know whose sample is whose:

    x [clients · batch, …, in] = [clients, batch · …, in];   x Wᵀ + b with W [clients, out, in], b [clients, out]
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from personafl.core.net import Net
from personafl.fast.layers import Linear
from personafl.fast.stack import Outside, Stack, stack_around

Put = Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]  # have values in the module until left


def folds(net: Net, places: Mapping[str, list[tuple[dict[str, Tensor | None], str]]]) -> bool:
    """Say whether a module's samples are apart, and clients have nothing of their own but linear layers.

    `places` has the tables of the module that hold each parameter, and its name there.
    """
    if not getattr(net._module, "apart", False) or net.batch_dependent or any(d.p for d in net._dropouts.values()):
        return False
    linear = {id(m._parameters) for m in net._module.modules() if type(m) is nn.Linear}
    return all(len(places[name]) == 1 and id(places[name][0][0]) in linear for name in net.shapes)


def called_as_one(net: Net, values: Mapping[str, Tensor], x: Tensor, put: Put) -> Tensor:
    """Return the output for samples x [batch, …] of all stacked clients at once; where none are stacked, of one."""
    stack, own = stack_around(), {name: values[name] for name in net.shapes}
    if stack is not None:
        own = {name: stack.plain(value) for name, value in own.items()}
    module: Any = net._module
    module.fused, module.again = True, functools.partial(_again, net, put, own, stack)
    try:
        if stack is not None:
            return _folded(module, stack, own, x, put)
        with DisableTorchFunction(), put(own):  # a `TorchFunctionMode` would look at every call
            output: Tensor = module(x)
        return output
    finally:
        module.fused = False
        del module.again


def _folded(module: nn.Module, stack: Stack, own: Mapping[str, Tensor], x: Tensor, put: Put) -> Tensor:
    samples = stack.plain(x)
    with Outside(), put(own), _Own(stack.clients):
        output: Tensor = module(samples.flatten(0, 1))
    return stack.each(output.reshape(*samples.shape[:2], *output.shape[1:]))


@contextlib.contextmanager
def _again(net: Net, put: Put, own: Mapping[str, Tensor], stack: Stack | None) -> Iterator[None]:
    """Have a module as it was while it was called, for what is computed once more in the backward pass."""
    with net._one_at_a_time, put(own), contextlib.nullcontext() if stack is None else _Own(stack.clients):
        yield


class _Own(TorchFunctionMode):
    """While it is entered, linear layers with weights [clients, out, in] take each client's samples by its own."""

    def __init__(self, clients: int) -> None:
        super().__init__()
        self._clients = clients

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute those; leave the rest to torch."""
        if func is functional.linear and args[1].ndim == 3:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        each = x.reshape(self._clients, -1, x.shape[-1])
        result: Tensor = Linear.apply(each, weight, bias, None)  # type: ignore[no-untyped-call]
        return result.reshape(*x.shape[:-1], weight.shape[1])
