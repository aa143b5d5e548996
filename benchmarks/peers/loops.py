"""Two loops that need nothing but torch: a tight one-by-one loop, and one in the manner of PFLlib.

Both train clients one after another. The tight loop is the fastest that is simple: one module, slices of shuffled
tensors, `torch._foreach_*` updates. PFLlib's has a model per client, and per client and round a DataLoader of (sample,
label) pairs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from work import DECAY, MOMENTUM, PULL, Work, clients_of, start_of

__all__ = ["PFLlibStyle", "Tight", "loss_of"]

Batches = Iterator[tuple[Tensor, Tensor]]


def loss_of(work: Work, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    with torch.autocast("cpu", torch.bfloat16) if work.bfloat16 else contextlib.nullcontext():
        outputs = model(x)
        return functional.cross_entropy(outputs.flatten(0, -2), y.flatten())


class Loop:
    """Clients one after another; weights by samples."""

    methods = ("fedavg", "fedalt", "ditto", "scaffold")

    def __init__(self, work: Work, method: str) -> None:
        self.work, self.method = work, method
        self.clients = clients_of(work)
        self.model = start_of(work)
        self.total = sum(len(y) for _, y in self.clients)
        self.number = 0  # of the round

    def batches(self, x: Tensor, y: Tensor) -> Batches:
        """Yield the minibatches of all epochs."""
        raise NotImplementedError

    def round(self) -> None:
        """Train all clients and average."""
        raise NotImplementedError

    def result(self) -> dict[str, Tensor]:
        """Return the shared model."""
        return {name: value.detach() for name, value in self.model.named_parameters()}


class Tight(Loop):
    """The tight loop."""

    def __init__(self, work: Work, method: str) -> None:
        super().__init__(work, method)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.params = [p for _, p in self.model.named_parameters()]
        self.server = [p.detach().clone() for p in self.params]
        self.personal = [name.startswith(work.head) and method == "fedalt" for name in self.names]
        self.own: dict[int, list[Tensor]] = {}
        self.control = [torch.zeros_like(p) for p in self.server]

    def batches(self, x: Tensor, y: Tensor) -> Batches:
        size = self.work.batch or len(y)
        for _ in range(self.work.epochs):
            order = torch.randperm(len(y))
            for rows in order.split(size):
                yield x[rows], y[rows]

    def descend(self, which: list[Tensor], x: Tensor, y: Tensor, extra: Callable[[list[Tensor]], None]) -> int:
        """Train some of the parameters; `extra` changes the gradients in place."""
        steps, buffers, rate = 0, None, self.work.rate(self.number)
        for p in self.params:
            p.requires_grad_(any(p is w for w in which))
        for bx, by in self.batches(x, y):
            gradients = list(torch.autograd.grad(loss_of(self.work, self.model, bx, by), which))
            with torch.no_grad():
                extra(gradients)
                if self.work.full:
                    torch._foreach_add_(gradients, which, alpha=DECAY)
                    if buffers is not None:
                        torch._foreach_add_(gradients, buffers, alpha=MOMENTUM)
                    buffers = gradients
                torch._foreach_add_(which, gradients, alpha=-rate)
            steps += 1
        return steps

    def load(self, values: list[Tensor]) -> None:
        """Copy values into the model."""
        with torch.no_grad():
            torch._foreach_copy_(self.params, values)

    def round(self) -> None:
        change = [torch.zeros_like(p) for p in self.server]
        moved = [torch.zeros_like(p) for p in self.server]  # of the controls
        for number, (x, y) in enumerate(self.clients):
            self.load(self.server)
            getattr(self, self.method)(number, x, y, moved)
            with torch.no_grad():
                torch._foreach_add_(change, torch._foreach_sub(self.params, self.server), alpha=len(y) / self.total)
        for value, step, personal in zip(self.server, change, self.personal, strict=True):
            if not personal:
                value.add_(step)
        torch._foreach_add_(self.control, moved)
        self.load(self.server)
        self.number += 1

    def fedavg(self, number: int, x: Tensor, y: Tensor, moved: list[Tensor]) -> None:
        """Train the shared model."""
        self.descend(self.params, x, y, lambda g: None)

    def fedalt(self, number: int, x: Tensor, y: Tensor, moved: list[Tensor]) -> None:
        """Train the personal head, then the rest."""
        head = [p for p, personal in zip(self.params, self.personal, strict=True) if personal]
        body = [p for p, personal in zip(self.params, self.personal, strict=True) if not personal]
        if number in self.own:
            with torch.no_grad():
                torch._foreach_copy_(head, self.own[number])
        self.descend(head, x, y, lambda g: None)
        self.descend(body, x, y, lambda g: None)
        self.own[number] = [p.detach().clone() for p in head]

    def ditto(self, number: int, x: Tensor, y: Tensor, moved: list[Tensor]) -> None:
        """Train the shared model, and the client's own, pulled towards the received one."""
        self.load(self.own.get(number, self.server))

        def pull(g: list[Tensor]) -> None:
            torch._foreach_add_(g, torch._foreach_sub(self.params, self.server), alpha=PULL)

        self.descend(self.params, x, y, pull)
        self.own[number] = [p.detach().clone() for p in self.params]
        self.load(self.server)
        self.descend(self.params, x, y, lambda g: None)

    def scaffold(self, number: int, x: Tensor, y: Tensor, moved: list[Tensor]) -> None:
        """Train the shared model with corrected gradients."""
        own = self.own.get(number, [torch.zeros_like(p) for p in self.server])
        correction = torch._foreach_sub(self.control, own)
        steps = self.descend(self.params, x, y, lambda g: torch._foreach_add_(g, correction))
        with torch.no_grad():
            length = steps * self.work.lr
            new = [(s - p) / length - c for s, p, c in zip(self.server, self.params, correction, strict=True)]
            torch._foreach_add_(moved, torch._foreach_sub(new, own), alpha=len(y) / self.total)
        self.own[number] = new


class PFLlibStyle(Loop):
    """A loop as PFLlib has it, FedAvg alone: a model, an optimizer and a DataLoader per client."""

    methods = ("fedavg",)

    def __init__(self, work: Work, method: str) -> None:
        super().__init__(work, method)
        self.models = [copy.deepcopy(self.model) for _ in self.clients]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=work.lr, **work.sgd()) for model in self.models]
        self.pairs = [list(zip(x, y, strict=True)) for x, y in self.clients]

    def round(self) -> None:
        for model, optimizer, pairs in zip(self.models, self.optimizers, self.pairs, strict=True):
            for new, old in zip(self.model.parameters(), model.parameters(), strict=True):
                old.data = new.data.clone()
            model.train()
            optimizer.state.clear()
            optimizer.param_groups[0]["lr"] = self.work.rate(self.number)
            loader = DataLoader(pairs, self.work.batch or len(pairs), shuffle=True)
            for _ in range(self.work.epochs):
                for x, y in loader:
                    loss = loss_of(self.work, model, x, y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        self.model = copy.deepcopy(self.models[0])
        for parameter in self.model.parameters():
            parameter.data.zero_()
        for model, pairs in zip(self.models, self.pairs, strict=True):
            for total, own in zip(self.model.parameters(), model.parameters(), strict=True):
                total.data += own.data.clone() * len(pairs) / self.total
        self.number += 1
