"""Convolutional networks, all with GroupNorm where they normalise, for images of 28 to 32 pixels and more.

CNN0 is FedAvg's, CNN1 and CNN2 are QuPeD's; ResNet-18 that of FedAlt/FedSim and FedSLR, ResNet-20 that of FedBCD and
QuPeD, which also has ResNet-32. Their stem is 3×3 without pooling, or ImageNet's for larger images.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from personafl.models.zoo import Size, image_shape

Stem = Literal["small", "imagenet"]
Groups = Size | tuple[Size, ...]


def lenet(input_shape: Sequence[int], classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling (LeCun et al. 1998); images of at least 12×12."""
    depth, height, width = image_shape(input_shape, 12)
    rows, columns = ((size // 2 - 4) // 2 for size in (height, width))
    return nn.Sequential(
        *_conv_relu_pool(depth, 6, padding=2),
        *_conv_relu_pool(6, 16, padding=0),
        nn.Flatten(),
        *_dense(16 * rows * columns, (120, 84), classes),
    )


def cnn0(input_shape: Sequence[int], classes: int) -> nn.Module:
    """FedAvg's CNN as PFLlib has it: 5×5 convolutions of 32 and 64, unpadded, then 512 units; at least 16×16."""
    depth, height, width = image_shape(input_shape, 16)
    rows, columns = (((size - 4) // 2 - 4) // 2 for size in (height, width))
    layers = [*_conv_relu_pool(depth, 32, padding=0), *_conv_relu_pool(32, 64, padding=0)]
    return nn.Sequential(*layers, nn.Flatten(), *_dense(64 * rows * columns, (512,), classes))


def cnn1(input_shape: Sequence[int], classes: int, *, filters: Size = 64) -> nn.Module:
    """QuPeD's CNN1: two 5×5 convolutions of `filters`, then 384 and 192 units; images of at least 16×16."""
    layers, pixels = _cnn1_features(input_shape, filters)
    return nn.Sequential(*layers, nn.Flatten(), *_dense(filters * pixels, (384, 192), classes))


def cnn2(input_shape: Sequence[int], classes: int, *, filters: Size = 64) -> nn.Module:
    """QuPeD's CNN2: CNN1 with one more 5×5 convolution, of half as many filters, before the units."""
    layers, pixels = _cnn1_features(input_shape, filters)
    last = max(1, filters // 2)
    layers += [nn.Conv2d(filters, last, 5, padding=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *_dense(last * pixels, (384, 192), classes))


def _cnn1_features(input_shape: Sequence[int], filters: int) -> tuple[list[nn.Module], int]:
    """Return CNN1's convolutions and the pixels that they leave of an image."""
    depth, height, width = image_shape(input_shape, 16)
    rows, columns = (((size - 4) // 2 - 4) // 2 for size in (height, width))
    return [*_conv_relu_pool(depth, filters, padding=0), *_conv_relu_pool(filters, filters, padding=0)], rows * columns


def _conv_relu_pool(inputs: int, outputs: int, padding: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def _dense(inputs: int, hidden: tuple[int, ...], classes: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return [*layers, nn.Linear(inputs, classes)]


class Block(nn.Module):
    """Two 3×3 convolutions with GroupNorm around a skip connection; `stride` divides the resolution."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        same = stride == 1 and inputs == outputs
        self.skip: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(groups, outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(f(x) + skip(x)): [batch, inputs, h, w] to [batch, outputs, h / stride, w / stride]."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet(nn.Module):
    """A residual network: a stem, then stages of blocks, each stage after the first at half the resolution.

    Stems: "small" is a 3×3 convolution that keeps the resolution; "imagenet" (He et al. 2016) a 7×7 one of stride 2 and
    3×3 max pooling of stride 2, which leave a quarter of it, for images of 64 pixels and more. `groups` of the norms is
    one number, or one for each stage; the stem has the first stage's.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        widths: Sequence[int],
        blocks: int,
        groups: Groups,
        stem: Stem,
        output_bias: bool,
    ) -> None:
        super().__init__()
        each = [groups] * len(widths) if isinstance(groups, int) else groups
        if len(each) != len(widths):
            raise ValueError(f"groups = {list(each)}: give one number, or one for each of {len(widths)} stages")
        large = stem == "imagenet"
        kernel, stride, padding = (7, 2, 3) if large else (3, 1, 1)
        self.stem = nn.Conv2d(channels, widths[0], kernel, stride, padding, bias=False)
        self.norm = nn.GroupNorm(each[0], widths[0])
        self.pool: nn.Module = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        stages: list[nn.Module] = []
        inputs = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                stages.append(Block(inputs, width, 2 if stage and not block else 1, each[stage]))
                inputs = width
        self.blocks = nn.Sequential(*stages)
        self.output = nn.Linear(inputs, classes, bias=output_bias)
        # With its norm the first layer has the 0.7K parameters of FedAlt/FedSim's Table 7.
        self.parts = {"input": ("stem.*", "norm.*")}

    def forward(self, x: Tensor) -> Tensor:
        """Map images [batch, channels, height, width] to scores [batch, classes]."""
        features = self.blocks(self.pool(functional.relu(self.norm(self.stem(x)))))
        scores: Tensor = self.output(features.mean((2, 3)))
        return scores


def _resnet(depth: int, stages: int, blocks: int, first: int) -> Callable[..., nn.Module]:
    """Return what makes a ResNet whose stages are each twice as wide as the one before."""

    def resnet(
        input_shape: Sequence[int],
        classes: int,
        *,
        width: Size = first,
        groups: Groups = 2,
        stem: Stem = "small",
        output_bias: bool = True,
    ) -> nn.Module:
        channels, _, _ = image_shape(input_shape, 8)
        widths = [width * 2**stage for stage in range(stages)]
        return ResNet(channels, classes, widths, blocks, groups, stem, output_bias)

    resnet.__name__ = f"resnet{depth}"
    what = f"{stages} stages of {blocks} blocks, the first `width` wide; images of at least 8×8."
    resnet.__doc__ = f"ResNet-{depth} with GroupNorm: {what}"
    return resnet


resnet18, resnet20, resnet32 = _resnet(18, 4, 2, 64), _resnet(20, 3, 3, 16), _resnet(32, 3, 5, 16)
