"""Whether clients with a network can be stacked: what is said of one with which they cannot."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn

from models.odd import ODD, Gru
from personafl.core.net import Net
from personafl.errors import BadInput
from personafl.fast.trial import try_stacked

X = torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(0))


def culprit(module: nn.Module) -> str | None:
    net = Net(module)
    with warnings.catch_warnings(action="error"):
        try_stacked(net, X)
    assert net.module()  # it can still be copied
    return net.unstackable


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Gru", "nn.GRU (first)"),
        ("Lstm", "nn.LSTM (first)"),
        ("Branch", "an if, a loop or .item() that depends on data"),
        ("Item", "an if, a loop or .item() that depends on data"),
        ("Mask", "We do not support batching operators that can support dynamic shape"),
        ("Numpy", "Cannot access data pointer of Tensor that doesn't have storage"),
        ("Writes", None),
        ("Keeps", None),
    ],
)
def test_a_layer_of_torchs_or_the_users_line(name: str, what: str | None) -> None:
    found = culprit(ODD[name]())
    if what is not None and not what.startswith("nn."):
        lines, start = inspect.getsourcelines(ODD[name].features)
        [offset] = [
            at for at, line in enumerate(lines) if any(word in line for word in ("if ", ".item", "[h <", "numpy"))
        ]
        what = f"line {start + offset} of odd.py ({what})"
    assert found == what


def test_what_cannot_be_looked_into_is_refused() -> None:
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        script = torch.jit.script(nn.Linear(5, 3))
    with pytest.raises(BadInput, match=r"^model: is compiled by torch\.jit"):
        Net(script)
    module = Gru()
    module.first = nn.GRU(2, 6, 2, batch_first=True, dropout=0.5)
    with pytest.raises(BadInput, match=r"dropout=0 in nn\.LSTM"):
        Net(module).probe(X)
