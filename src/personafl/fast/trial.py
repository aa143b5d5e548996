"""Whether networks of several clients can be run at once."""

import torch
from torch import Tensor
from torch.func import grad, vmap

from personafl.core.net import Net
from personafl.core.tree import Params
from personafl.fast.gradient import step
from personafl.fast.table import enabled


@enabled()
def try_stacked(net: Net, x: Tensor) -> None:
    """Run two stacked copies of a network on x [batch, …] as training does; if that fails, `unstackable` says why."""
    params, both = net.some_parameters(x), torch.stack([x, x])
    stacked = {name: value.expand(2, *value.shape) for name, value in params.items()}
    key = torch.zeros((), dtype=torch.int64, device=x.device)
    real = torch.ones(len(x), dtype=torch.bool, device=x.device)

    def total(p: Params, own: Tensor) -> Tensor:
        return net.apply(p, own, real, key).sum()

    try:
        net.apply(params, x, real, key)  # alone, which tells what the module does to its inputs
        vmap(grad(total))(stacked, both)
        vmap(lambda p, own: step(total, p, own, 0.0)[0])(stacked, both)
        vmap(lambda own: net.apply(params, own, real, key))(both)  # as clients with a model in common have it
    except Exception as error:  # a module's forward() may raise anything
        net.unstackable = (str(error).strip() or type(error).__name__).splitlines()[0]
