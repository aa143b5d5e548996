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
        # conv 32·25+32, 64·800+64; 64·4·4 = 1024 features: 1024·512+512, 512·10+10: PFLlib's 582,026
        ("cnn0", (1, 28, 28), 10, 832 + 51_264 + 524_800 + 5_130),
        # conv 64·75+64, 64·1600+64; 64·5·5 = 1600 features: 1600·384+384, 384·192+192, 192·10+10
        ("cnn1", (3, 32, 32), 10, 4_864 + 102_464 + 614_784 + 73_920 + 1_930),
        # and 32·1600+32 more; 32·5·5 = 800 features: 800·384+384
        ("cnn2", (3, 32, 32), 10, 4_864 + 102_464 + 51_232 + 307_584 + 73_920 + 1_930),
        # torchvision's ResNet-18 has 11,689,512: 3×3 stem 64·27 for 64·147, 10 for 1000 classes (513·990 fewer)
        ("resnet18", (3, 32, 32), 10, 11_689_512 - 64 * (147 - 27) - 513 * 990),
        # the usual ResNet-20 and ResNet-32 have 0.27M and 0.46M (He et al. 2016, Table 6): two more blocks in each of
        # 3 stages of c channels, 18c² + 4c each
        ("resnet20", (3, 32, 32), 10, 272_474),
        ("resnet32", (3, 32, 32), 10, 272_474 + 2 * sum(18 * c * c + 4 * c for c in (16, 32, 64))),
    ],
)
def test_sizes(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    with torch.device("meta"):
        assert count(MODELS[name](input_shape=shape, classes=classes)) == parameters


@pytest.mark.parametrize(
    ("classes", "stem", "bias", "parameters"),
    [
        (1000, "imagenet", True, 11_689_512),  # torchvision's
        (200, "imagenet", False, 11_689_512 - 513_000 + 512 * 200),  # FedSLR's for TinyImageNet
        (10, "small", False, 11_689_512 - 64 * (147 - 27) - 513_000 + 512 * 10),  # and for CIFAR-10: 11.17M in Table 2
    ],
)
def test_stems_and_outputs_of_resnet18(classes: int, stem: str, bias: bool, parameters: int) -> None:
    with torch.device("meta"):
        module = MODELS["resnet18"](input_shape=(3, 64, 64), classes=classes, stem=stem, output_bias=bias)
    assert count(module) == parameters
    assert ("output.bias" in dict(module.named_parameters())) == bias


def test_the_imagenet_stem_is_a_convolution_and_a_pooling_of_stride_2() -> None:
    """By hand: zeros around 13×13 pixels, a 7×7 product at every other one, then maxima of 3×3 at every other one."""
    module = MODELS["resnet20"](input_shape=(1, 13, 13), classes=3, width=2, stem="imagenet")
    x = torch.rand(1, 1, 13, 13)
    padded = torch.zeros(19, 19)
    padded[3:16, 3:16] = x[0, 0]
    with torch.no_grad():
        first = torch.stack(
            [
                (kernel[0] * padded[2 * i : 2 * i + 7, 2 * j : 2 * j + 7]).sum()
                for kernel in module.stem.weight
                for i in range(7)
                for j in range(7)
            ]
        ).reshape(1, 2, 7, 7)
        values = module.norm(first).relu()[0]
        spans = [slice(max(0, 2 * i - 1), 2 * i + 2) for i in range(4)]
        pooled = torch.stack([values[:, a, b].amax((1, 2)) for a in spans for b in spans], 1).reshape(1, 2, 4, 4)
        expected = module.output(module.blocks(pooled).mean((2, 3)))
        assert torch.allclose(module(x), expected, atol=1e-5)


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


def test_resnet18_with_imagenets_stem_has_the_personal_parts_of_table_6() -> None:
    """FedAlt/FedSim, GLDv2: 12.2M; input 0.01M, output 1M, residual adapters 1.4M.

    Input: 3·49·64 + 2·64. Output: 512·2028 + 2028. Adapters at the 3×3 convolutions, which the stem is none of.
    """
    with torch.device("meta"):
        plain = MODELS["resnet18"](input_shape=(3, 224, 224), classes=2028, stem="imagenet", groups=(8, 8, 16, 32))
        adapted = with_adapters(plain, default_adapter(plain))
    assert round(count(plain) / 1e6, 1) == 12.2
    assert count(plain, "input") == 9_536
    assert count(plain, "output") == 1_040_364
    assert count(adapted, "adapter") == sum(4 * (c * c + 2 * c) for c in (64, 128, 256, 512)) == 1_400_320
    groups = [layer.num_groups for layer in plain.modules() if isinstance(layer, torch.nn.GroupNorm)]
    assert groups == [8] * 5 + [8] * 5 + [16] * 5 + [32] * 5


@pytest.mark.parametrize(("name", "options"), [("resnet18", {"width": 4}), ("resnet20", {"width": 2})])
def test_resnets_halve_the_resolution_per_stage(name: str, options: dict[str, Any]) -> None:
    module = MODELS[name](input_shape=(1, 28, 28), classes=3, **options)
    sizes = []
    for block in module.blocks:
        block.register_forward_hook(lambda _layer, _x, y: sizes.append(y.shape[-1]))
    module(torch.rand(1, 1, 28, 28))
    assert sizes == ([28, 28, 14, 14, 7, 7, 4, 4] if name == "resnet18" else [28] * 3 + [14] * 3 + [7] * 3)
