"""What a server rule is given of stacked uploads, as a server joins them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from personafl.core import wire
from personafl.core.algorithm import NOTHING_OWN, Own, Reduced, ServerRule, reduce


def joined(rule: ServerRule, state: Any, uploads: Any, weights: Tensor, clients: Any, number: int) -> Reduced:
    dense = wire.dense_each(uploads)
    if rule.join_from is None:
        return reduce(dense, weights)
    return rule.join_from(state, None, dense, weights, np.asarray(clients), number)


def addressed(rule: ServerRule, state: Any, clients: Any) -> Own:
    return NOTHING_OWN if rule.address is None else rule.address(state, np.asarray(clients))
