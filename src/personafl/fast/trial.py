"""Whether networks of several clients can be run at once, and if not, why."""

import copy
import traceback
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.func import grad, vmap

from personafl.core.net import Net
from personafl.core.tree import Params
from personafl.fast.gradient import step
from personafl.fast.table import enabled


@enabled()
def try_stacked(net: Net, x: Tensor) -> None:
    """Run two stacked copies of a network on x [batch, …] as training does; if that fails, `unstackable` says at what.

    That is the end of a line that begins with "torch.func cannot batch".
    """
    params, both, copied = net.some_parameters(x), torch.stack([x, x]), copy.deepcopy(net)
    stacked = {name: value.expand(2, *value.shape) for name, value in params.items()}
    key = torch.zeros((), dtype=torch.int64, device=x.device)
    real = torch.ones(len(x), dtype=torch.bool, device=x.device)

    def total(p: Params, own: Tensor) -> Tensor:
        return copied.apply(p, own, real, key).sum()  # not the net's own module, which may keep what it saw

    try:
        net.apply(params, x, real, key)  # alone, which tells what the module does to its inputs
        with warnings.catch_warnings(
            action="ignore"
        ):  # of what torch runs in a loop before it finds out that it cannot
            vmap(grad(total))(stacked, both)
            vmap(lambda p, own: step(total, p, own, 0.0)[0])(stacked, both)
            vmap(lambda own: copied.apply(params, own, real, key))(both)  # as clients with a model in common have it
    except Exception as error:  # a module's forward() may raise anything
        net.unstackable = _culprit(copied, error)


def _culprit(net: Net, error: Exception) -> str:
    """Return what failed: a layer of torch's by its name, or a line of the user's code with torch's reason."""
    names = {id(layer): name for name, layer in net._module.named_modules()}
    told = (str(error).strip() or type(error).__name__).splitlines()[0].removeprefix("vmap: ").partition(". ")[0]
    if "data-dependent control flow" in told:
        told = "an if, a loop or .item() that depends on data"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        layer = frame.f_locals.get(next(iter(code.co_varnames), ""))  # whose method it is
        if id(layer) not in names or code.co_name in ("_call_impl", "_wrapped_call_impl"):
            continue
        if type(layer).__module__.startswith("torch.nn."):
            return f"nn.{type(layer).__name__} ({names[id(layer)] or 'the model'})"
        return f"line {line} of {Path(code.co_filename).name} ({told})"
    return f"the model ({told})"
