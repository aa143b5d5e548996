"""What a network costs where it is used: multiply-adds, and time on this machine."""

import statistics
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

_WARM_UP = 5
_LEAST, _MOST = 11, 501  # passes of each network
_SECONDS = 3.0


def multiply_adds(module: nn.Module, x: Tensor) -> int:
    """Count the multiply-adds of matrix products and convolutions when a network is applied to x [batch, …]."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x)
    return int(counter.get_total_flops()) // 2


@torch.no_grad()
def latency(networks: Mapping[str, nn.Module], x: Tensor) -> dict[str, float]:
    """Return the median milliseconds that each network takes for x [batch, …].

    After a warm-up the networks take turns, so that whatever else the machine does falls on all of them alike; for
    three seconds, but not fewer than 11 or more than 501 turns.
    """
    spent: dict[str, list[float]] = {name: [] for name in networks}
    for network in networks.values():
        for _ in range(_WARM_UP):
            network(x)
    began = time.perf_counter()
    for turn in range(_MOST):
        if turn >= _LEAST and time.perf_counter() - began > _SECONDS:
            break
        for name, network in networks.items():
            spent[name].append(_seconds(network, x))
    return {name: 1000 * statistics.median(values) for name, values in spent.items()}


def _seconds(network: nn.Module, x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    network(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
