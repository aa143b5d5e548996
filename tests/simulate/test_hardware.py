"""How exactly a run computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from personafl import api
from personafl.errors import BadInput
from personafl.simulate.hardware import set_arithmetic
from tiers import tiered

CNN = {"name": "cnn", "channels": [4, 8], "personal": "output"}
FEW = {"partition": {"kind": "iid", "clients": 6}}


@pytest.mark.parametrize(("dtype", "device"), [("tf32", "cpu"), ("tf32", "mps"), ("bfloat16", "mps")])
def test_what_a_device_cannot_do_is_refused(dtype: str, device: str) -> None:
    with pytest.raises(BadInput, match=f'engine.dtype: "{dtype}" is not possible on {device}; use "float32"'):
        set_arithmetic(dtype, torch.device(device))


@pytest.mark.parametrize(
    ("method", "strategy"), tiered([("fedalt", "stacked"), ("fedrep", "sequential")], [("fedalt", "stacked")])
)
def test_products_in_bfloat16_train_about_as_well(tmp_path: Path, method: str, strategy: str) -> None:
    recipe = {"method": {"name": method}, "rounds": 3, "model": CNN, "data": FEW}
    rounded, plain = (
        api.run(
            {**recipe, "engine": {"device": "cpu", "strategy": strategy, "dtype": dtype}}, out=tmp_path / dtype
        ).rows[-1]
        for dtype in ("bfloat16", "float32")
    )
    assert rounded["loss"] != plain["loss"]
    assert abs(rounded["accuracy"] - plain["accuracy"]) < 0.1


def test_bfloat16_repeats_with_any_number_of_workers(tmp_path: Path) -> None:
    one, two = (
        api.run(
            {
                "rounds": 2,
                "model": CNN,
                "data": FEW,
                "engine": {"device": "cpu", "dtype": "bfloat16", "workers": workers},
            },
            out=tmp_path / str(workers),
        ).rows[-1]
        for workers in (1, 2)
    )
    assert one["loss"] == two["loss"]
