"""Samples of many clients through a network as one batch, without vmap: adapters beside a frozen model.

What constants alone compute is the same function for all clients. If a module's output for a sample depends on no other
sample (it says so: `apart`), those of all clients [clients · batch, …] go through it as if they were one client's, in
torch's own kernels, and only the linear layers that clients have of their own know whose sample is whose:

    x [clients · batch, …, in] = [clients, batch · …, in];   x Wᵀ + b with W [clients, out, in], b [clients, out]
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from personafl.fast.layers import Linear
from personafl.fast.stack import Outside, Stack

Put = Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]  # have values in the module until left


def folded(module: nn.Module, stack: Stack, values: Mapping[str, Tensor], x: Tensor, put: Put) -> Tensor:
    """Return module(x) for the clients of a stack, x [batch, …] of each."""
    own = {name: stack.plain(value) for name, value in values.items()}
    samples = stack.plain(x)
    with Outside(), put(own), _Own(stack.clients):
        output: Tensor = module(samples.flatten(0, 1))
    return stack.each(output.unflatten(0, samples.shape[:2]))


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
