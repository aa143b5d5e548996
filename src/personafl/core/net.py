"""A network as a pure function of its parameters, made from any `nn.Module`.

What torch.func cannot take is changed or refused here, once, before any training:
- `nn.Dropout` draws its mask from a key that comes with the batch, so it differs per client and step, repeats exactly,
  and is the same whether clients run one by one or stacked;
- normalisation with running statistics follows an explicit `buffers` policy.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from personafl.core import rng
from personafl.core.seam import replaceable
from personafl.core.tree import Params
from personafl.errors import BadInput
from personafl.options import users_code

Buffers = Literal["refused", "shared", "dropped"]


class Net:
    """A network without weights: `apply(params, x)` is pure, `init(generator)` draws a start.

    Parameters that the module has frozen (requires_grad=False) are constants: not trained, not sent, and the same
    memory in all copies of a network. Those in half precision stay in it.

    buffers, for BatchNorm-like layers with running statistics:
    - "refused" (default): an error that names the layers;
    - "shared": the statistics the module came with are fixed and the same for everyone (a pre-trained model's);
    - "dropped": no running statistics; each batch is normalised by its own real samples, also when scoring.
    """

    def __init__(self, make: nn.Module | Callable[[], nn.Module], buffers: Buffers = "refused") -> None:
        self._make = None if isinstance(make, nn.Module) else make
        # What a maker draws besides parameters (random features, say) must not differ between processes: seed 0.
        module = make if isinstance(make, nn.Module) else _made(make, 0)
        self._start = {n: value.detach().clone() for n, value in module.named_parameters() if value.requires_grad}
        self._module = _prepared(module, buffers)
        self._dropouts = {name: m for name, m in self._module.named_modules() if isinstance(m, _KeyedDropout)}
        self._norms = [name for name, m in self._module.named_modules() if isinstance(m, _MaskedNorm)]
        self._one_at_a_time = threading.RLock()  # a call puts its values into the module
        self.convolutional = any(isinstance(m, nn.modules.conv._ConvNd) for m in self._module.modules())
        self.shapes = {name: value.shape for name, value in self._start.items()}
        self.constant = len(self.shapes) < sum(1 for _ in self._module.parameters())  # whether some are frozen
        self.sample_bytes = 0  # that a sample's pass keeps for its gradient, where it was probed
        self.unstackable: str | None = None  # what of it cannot be run for several clients at once, if that was found
        self.head: str | None = None  # which of `core.heads` it has, if it was given one

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_one_at_a_time"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _one_at_a_time=threading.RLock())  # locks do not travel to other machines

    def init(self, generator: torch.Generator) -> Params:
        """Return start parameters: drawn anew from the generator, or the weights of the module that was given."""
        if self._make is None:
            return {name: value.clone() for name, value in self._start.items()}
        fresh = _made(self._make, int(torch.randint(2**62, (), generator=generator, device=generator.device)))
        return {name: value.detach().clone() for name, value in fresh.named_parameters() if name in self.shapes}

    def apply(self, params: Params, x: Tensor, real: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        """Return the outputs for x [batch, …]. With a key, dropout is on; `real` marks the samples that count."""
        if params.keys() != self.shapes.keys():  # functional_call would fill in the module's own, silently
            raise ValueError(f"parameters {sorted(params.keys() ^ self.shapes.keys())} are missing or of another net")
        extra: dict[str, Tensor] = {}
        if key is not None:
            extra |= {f"{name}.key": key for name in self._dropouts}
        if real is not None:
            extra |= {f"{name}.real": real for name in self._norms}
        with self._one_at_a_time:
            for dropout in self._dropouts.values():
                dropout.calls = 0
            return self.called(params | extra, x)

    @replaceable
    def called(self, values: dict[str, Tensor], x: Tensor) -> Tensor:
        """Call the module with values for its parameters and buffers, on inputs that it may write into."""
        output: Tensor = functional_call(self._module, values, (x.clone(),))
        return output

    def module(self) -> nn.Module:
        """Return a copy of the network as a module; its weights are nobody's."""
        return copied(self._module, self._constants())

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def batch_dependent(self) -> bool:
        """Whether a sample's output depends on the other samples of its batch."""
        return bool(self._norms)

    def to(self, device: torch.device, dtype: torch.dtype) -> Net:
        """Move the module's constants; parameters are arguments and live where they are made."""
        halves = {id(value) for value in self._constants() if value.dtype in (torch.bfloat16, torch.float16)}

        def moved(value: Tensor) -> Tensor:
            return value.to(device, dtype if value.is_floating_point() and id(value) not in halves else value.dtype)

        self._module._apply(moved)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Net:
        """Copy it, but for its constants."""
        new = copy.copy(self)
        memo |= _same_memory(self._constants())
        vars(new).update({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return new

    @contextmanager
    def _counted(self, samples: int) -> Iterator[None]:
        """Count what a pass with so many samples keeps: tensors, but for the network's own."""
        own = {value.data_ptr() for value in self._module.parameters()}
        kept: dict[int, int] = {}

        def keep(value: Tensor) -> Tensor:
            storage = value.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            yield
        self.sample_bytes = sum(kept.values()) // samples

    def _constants(self) -> list[nn.Parameter]:
        return [value for name, value in self._module.named_parameters() if name not in self.shapes]

    def some_parameters(self, like: Tensor) -> Params:
        """Return parameters to try the network with on inputs like these."""
        dtype = like.dtype if like.is_floating_point() else None
        return {
            name: value.to(like.device, dtype) for name, value in self._module.named_parameters() if name in self.shapes
        }

    def probe(self, x: Tensor) -> Tensor:
        """Run it on x [batch, …] in training mode and return the output, or say what does not work."""
        key = torch.zeros((), dtype=torch.int64, device=x.device)
        real = torch.ones(len(x), dtype=torch.bool, device=x.device)
        draws = torch.cuda.get_rng_state if x.is_cuda else torch.get_rng_state
        before = draws()
        with users_code(f"model: it does not accept this data's inputs of shape {list(x.shape[1:])}"):
            params = {name: value.detach().requires_grad_() for name, value in self.some_parameters(x).items()}
            with torch.enable_grad(), self._counted(len(x)):
                output = self.apply(params, x, real, key)
            with torch.no_grad():  # last, for a module that keeps what it saw could not be copied with its graph
                again = [self.apply(params, x, real, key) for _ in range(3)]
        if not isinstance(output, Tensor):
            raise BadInput(f"model: forward() returns a {type(output).__name__}; it must return one tensor of outputs")
        # Another thread may have drawn meanwhile; then outputs are still the same.
        if not torch.equal(before, draws()) and not all(torch.equal(other, output) for other in again):
            remedy = "use nn.Dropout as a layer, and dropout=0 in nn.LSTM, nn.MultiheadAttention and such"
            raise BadInput(f"model: forward() draws at random, so runs would not repeat; {remedy}")
        if not output.requires_grad and not torch.is_inference_mode_enabled():
            raise BadInput("model: no parameter of it has a gradient, so that nothing is learned; check forward()")
        return output.detach()


def copied(module: nn.Module, shared: Iterable[nn.Parameter] | None = None) -> nn.Module:
    """Return a copy of a module, in which some parameters have the memory they had; None: the frozen ones.

    Tensors that are neither parameters nor buffers are not copied: `forward()` may have kept some to be looked at, and
    those of a pass with several clients cannot be.
    """
    if shared is None:
        shared = [value for value in module.parameters() if not value.requires_grad]
    loose = (value for layer in module.modules() for value in vars(layer).values() if isinstance(value, Tensor))
    return copy.deepcopy(module, {id(value): value for value in loose} | _same_memory(shared))


def _same_memory(parameters: Iterable[nn.Parameter]) -> dict[int, Any]:
    """Return what tells `copy.deepcopy` so."""
    return {id(value): nn.Parameter(value.detach(), requires_grad=value.requires_grad) for value in parameters}


def _made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class _KeyedDropout(nn.Module):
    """Dropout whose mask is a hash of (key, layer, call, position): stateless, so equal however clients are run."""

    key: Tensor

    def __init__(self, p: float, layer: int, whole_channels: bool) -> None:
        super().__init__()
        self.p, self.layer, self.whole_channels = p, layer, whole_channels
        self.calls = 0  # so far in this pass: a module used twice drops different entries
        self.register_buffer("key", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.key is None or self.p == 0.0:
            return x
        shape = x.shape[:2] + (1,) * (x.ndim - 2) if self.whole_channels else x.shape
        position = torch.arange(shape.numel(), device=x.device).reshape(shape)
        z = rng.scramble(rng.scramble(position + self.key) + (self.layer + (self.calls << 32)))
        self.calls += 1
        uniform = ((z >> 11) & ((1 << 52) - 1)).to(torch.float64) / (1 << 52)
        return torch.where(uniform < self.p, torch.zeros((), dtype=x.dtype, device=x.device), x / (1 - self.p))


class _MaskedNorm(nn.Module):
    """BatchNorm by the statistics of the batch's real samples, channel axis 1; padding has no say."""

    real: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps, self.weight, self.bias = norm.eps, norm.weight, norm.bias
        self.register_buffer("real", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        axes = [0, *range(2, x.ndim)]
        ones = torch.ones(len(x), dtype=torch.bool, device=x.device)
        real = (ones if self.real is None else self.real).to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
        count = (real.sum() * (x[0, 0].numel())).clamp(min=1)
        mean = (x * real).sum(axes, keepdim=True) / count
        variance = ((x - mean).square() * real).sum(axes, keepdim=True) / count
        x = (x - mean) / (variance + self.eps).sqrt()
        shape = [1, -1] + [1] * (x.ndim - 2)
        return x if self.weight is None else x * self.weight.reshape(shape) + self.bias.reshape(shape)


def _prepared(module: nn.Module, buffers: Buffers) -> nn.Module:
    """Return a copy in which every layer is a pure function of parameters, key and mask."""
    if isinstance(module, torch.jit.ScriptModule):
        raise BadInput(
            "model: is compiled by torch.jit, and its layers cannot be seen; give the module it was made from"
        )
    module = copied(module).train()
    # With duplicates: a layer used under two names must be replaced in both places.
    layers = list(module.named_modules(remove_duplicate=False))
    tracked = [n for n, m in layers if getattr(m, "running_mean", None) is not None]
    if tracked and buffers == "refused":
        raise BadInput(
            f"model: layers {', '.join(tracked)} keep running statistics, which cannot be shared silently; use "
            'GroupNorm or LayerNorm, or model.buffers = "shared" (fixed statistics) or "dropped" (batch statistics)'
        )
    for count, (name, layer) in enumerate(layers):
        parent = module.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout | nn.RReLU):
            instead = "nn.LeakyReLU" if isinstance(layer, nn.RReLU) else "nn.Dropout"
            raise BadInput(f"model: layer {name} is {type(layer).__name__}, which is not supported; use {instead}")
        if isinstance(layer, _DropoutNd):
            _put(parent, name, _KeyedDropout(layer.p, count, whole_channels=not isinstance(layer, nn.Dropout)))
        elif name in tracked and buffers == "shared":
            layer.eval()
        elif isinstance(layer, _BatchNorm):  # dropped, or without running statistics from the start
            _put(parent, name, _MaskedNorm(layer))
        elif isinstance(layer, _InstanceNorm):
            layer.running_mean = layer.running_var = None  # each sample by its own statistics
    return module.requires_grad_(False)


def _put(parent: nn.Module, name: str, layer: nn.Module) -> None:
    setattr(parent, name.rpartition(".")[2], layer)
