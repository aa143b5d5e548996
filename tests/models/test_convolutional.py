"""Convolutional networks: their sizes are the papers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from personafl.models import MODELS, default_adapter, personal_split, with_adapters


def count(module: torch.nn.Module, personal: str | None = None) -> int:
    split = None if personal is None else personal_split(module, personal)
    return sum(p.numel() for n, p in module.named_parameters() if split is None or split.is_personal(n))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        # conv 6·25+6, 16·150+16; 400·120+120, 120·84+84, 84·10+10
        ("lenet", (1, 28, 28), 10, 156 + 2_416 + 48_120 + 10_164 + 850),
        # conv 64·75+64, 64·1600+64; 64·5·5 = 1600 features: 1600·384+384, 384·192+192, 192·10+10
        ("cnn1", (3, 32, 32), 10, 4_864 + 102_464 + 614_784 + 73_920 + 1_930),
        # and 32·1600+32 more; 32·5·5 = 800 features: 800·384+384
        ("cnn2", (3, 32, 32), 10, 4_864 + 102_464 + 51_232 + 307_584 + 73_920 + 1_930),
        # torchvision's ResNet-18 has 11,689,512: 3×3 stem 64·27 for 64·147, 10 for 1000 classes (513·990 fewer)
        ("resnet18", (3, 32, 32), 10, 11_689_512 - 64 * (147 - 27) - 513 * 990),
        # the usual ResNet-20 has 0.27M (He et al. 2016, Table 6)
        ("resnet20", (3, 32, 32), 10, 272_474),
    ],
)
def test_sizes(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    with torch.device("meta"):
        assert count(MODELS[name](input_shape=shape, classes=classes)) == parameters


def test_resnet18_has_the_personal_parts_of_table_7() -> None:
    """FedAlt/FedSim, EMNIST: 11.2M; input 0.7K, output 0.03M, residual adapters 1.4M.

    Input: 9·64 + 2·64 with its norm. Output: 512·62 + 62. Adapters, c² + 2c at each of the 3×3 convolutions of c
    channels: 5 of 64 (with the stem) and 4 of 128, 256 and 512.
    """
    with torch.device("meta"):
        plain = MODELS["resnet18"](input_shape=(1, 28, 28), classes=62)
        adapted = with_adapters(plain, default_adapter(plain))
    assert round(count(plain) / 1e6, 1) == 11.2
    assert count(plain, "input") == 704
    assert count(plain, "output") == 31_806
    channels = [64] * 5 + [128] * 4 + [256] * 4 + [512] * 4
    assert count(adapted, "adapter") == sum(c * c + 2 * c for c in channels) == 1_404_544
    assert count(adapted) - count(plain) == count(adapted, "adapter")


@pytest.mark.parametrize(("name", "options"), [("resnet18", {"width": 4}), ("resnet20", {"width": 2})])
def test_resnets_halve_the_resolution_per_stage(name: str, options: dict[str, Any]) -> None:
    module = MODELS[name](input_shape=(1, 28, 28), classes=3, **options)
    sizes = []
    for block in module.blocks:
        block.register_forward_hook(lambda _layer, _x, y: sizes.append(y.shape[-1]))
    module(torch.rand(1, 1, 28, 28))
    assert sizes == [28, 28, 14, 14, 7, 7, 4, 4] if name == "resnet18" else [28] * 3 + [14] * 3 + [7] * 3
