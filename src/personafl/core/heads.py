"""Heads that a client's own network has in place of its last linear layer, for methods that say so (`Algorithm.head`).

With z the features that go into that layer (W, b), and ⊙ by entries:

- gated:   r(z) ⊙ z goes into (W, b), and (1 − r(z)) ⊙ z into a second layer; their scores are added.
           r = softmax over the pair (a, c) of each feature, with (a, c) = ReLU(LayerNorm(P z + p));
- valved:  ReLU(scale ⊙ z + shift) goes into (W, b).

Parameters that a head adds are beside the layer's own, which keep their names.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from personafl.core.net import Net
from personafl.core.split import Split
from personafl.errors import BadInput


class Policy(NamedTuple):
    """What divides features between two layers."""

    weight: Tensor  # P [2·width, width]
    bias: Tensor  # p [2·width]
    scale: Tensor  # of the norm, [2·width]
    shift: Tensor  # [2·width]

    def share(self, z: Tensor) -> Tensor:
        """Return r of inputs [..., width], the same shape."""
        scores = functional.linear(z, self.weight, self.bias)
        scores = functional.layer_norm(scores, scores.shape[-1:], self.scale, self.shift).relu()
        first, second = scores.chunk(2, -1)
        return torch.sigmoid(first - second)


class GatedLinear(nn.Linear):
    """W (r ⊙ z) + b + shared((1 − r) ⊙ z)."""

    shared: nn.Linear
    policy: nn.Linear
    norm: nn.LayerNorm

    def grow(self) -> None:
        """Add what a linear layer does not have."""
        width, like = self.in_features, self.weight
        self.shared = nn.Linear(width, self.out_features, self.bias is not None).to(like)
        self.policy, self.norm = nn.Linear(width, 2 * width).to(like), nn.LayerNorm(2 * width).to(like)

    def forward(self, z: Tensor) -> Tensor:
        """Return the scores [..., out]."""
        r = Policy(self.policy.weight, self.policy.bias, self.norm.weight, self.norm.bias).share(z)
        scores: Tensor = super().forward(r * z) + self.shared((1 - r) * z)
        return scores


class ValvedLinear(nn.Linear):
    """W ReLU(scale ⊙ z + shift) + b."""

    scale: nn.Parameter
    shift: nn.Parameter

    def grow(self) -> None:
        """Add what a linear layer does not have."""
        self.scale = nn.Parameter(self.weight.new_ones(self.in_features))
        self.shift = nn.Parameter(self.weight.new_zeros(self.in_features))

    def forward(self, z: Tensor) -> Tensor:
        """Return the scores [..., out]."""
        return super().forward((self.scale * z + self.shift).relu())


HEADS: dict[str, type[GatedLinear | ValvedLinear]] = {"gated": GatedLinear, "valved": ValvedLinear}


def with_head(net: Net, split: Split | None, head: str) -> Net:
    """Return a network with another head in place of the layer that is personal, which must be linear."""
    module, found = net.module(), None
    for name, value in module.named_parameters():
        value.requires_grad_(name in net.shapes)
    own = {name.rpartition(".")[0] for name in net.shapes if split is not None and split.is_personal(name)}
    if len(own) == 1:
        found = module.get_submodule(next(iter(own)))
    if type(found) is not nn.Linear:  # of a subclass one does not know what it computes
        raise BadInput(
            "model.personal: this method gives a client's network another head in place of its last linear layer, so "
            "this must be that one, and an nn.Linear; set it to output"
        )
    found.__class__ = HEADS[head]
    found.grow()  # type: ignore[operator]
    changed = Net(module, "shared")  # what is to be said of running statistics was said
    changed.unstackable, changed.sample_bytes, changed.head = net.unstackable, net.sample_bytes, head
    return changed
