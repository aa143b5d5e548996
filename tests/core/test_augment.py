"""Augmented images: the windows that are cut, how they are drawn, and training on them, against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from personafl.core import rng
from personafl.core.augment import Augment, augmented
from personafl.core.batches import Batches, Padding
from personafl.core.descend import descend
from personafl.core.losses import MeanLoss, cross_entropy
from personafl.core.net import Net
from personafl.core.optim import Sgd
from personafl.fast.table import enabled

CASES = [
    (Augment(flip=True), (3, 5, 4)),
    (Augment(crop=2), (1, 3, 7)),
    (Augment(flip=True, crop=4), (3, 5, 6)),
    (Augment(flip=True, crop=1, black=(-0.5, -1.25)), (2, 4, 4)),
]


def drawn(key: int, count: int, crop: int) -> list[tuple[bool, int, int]]:
    """Whether each sample of a step is mirrored, and where its window begins: from `rng.mix` of key and place."""
    start = np.array(key, dtype=np.int64).view(np.uint64)
    with np.errstate(over="ignore"):

        def follow(state: NDArray[np.uint64], word: NDArray[np.uint64]) -> NDArray[np.uint64]:
            """What `rng.mix` does with one word more: mix(a, b) follows mix(a) with b."""
            return rng.mix((state ^ word).astype(np.uint64))

        hashes = follow(follow(start, rng.mix("augment")), np.arange(count, dtype=np.uint64))
    places = 2 * crop + 1
    words = [int(word) for word in hashes]
    return [(word % 2 == 1, (word >> 8) % 2**28 % places, (word >> 36) % 2**28 % places) for word in words]


def seen(images: NDArray[np.float64], key: int, how: Augment) -> NDArray[np.float64]:
    """Pad, cut and mirror image by image."""
    count, channels, height, width = images.shape
    black = np.array(how.black or [0.0] * channels)[:, None, None]
    result = []
    for image, (mirrored, down, right) in zip(images, drawn(key, count, how.crop), strict=True):
        framed = np.tile(black, (1, height + 2 * how.crop, width + 2 * how.crop))
        framed[:, how.crop : how.crop + height, how.crop : how.crop + width] = image
        window = framed[:, down : down + height, right : right + width]
        result.append(window[:, :, ::-1] if mirrored and how.flip else window)
    return np.stack(result)


def random(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).random(shape))


def test_a_window_by_hand() -> None:
    """A 2×2 image in a frame of one black pixel has nine windows, and as many mirrored; each is drawn."""
    image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], dtype=torch.float64).repeat(400, 1, 1, 1)
    found = {tuple(map(int, window.flatten())) for window in augmented(image, torch.tensor(7), Augment(crop=1))}
    assert found == {
        (0, 0, 0, 1), (0, 0, 1, 2), (0, 0, 2, 0),
        (0, 1, 0, 3), (1, 2, 3, 4), (2, 0, 4, 0),
        (0, 3, 0, 0), (3, 4, 0, 0), (4, 0, 0, 0),
    }  # fmt: skip
    both = augmented(image, torch.tensor(7), Augment(flip=True, crop=1))
    assert {tuple(map(int, window.flip(-1).flatten())) for window in both} > found


@pytest.mark.parametrize(("how", "shape"), CASES)
def test_windows_are_those_of_a_plain_loop(how: Augment, shape: tuple[int, ...]) -> None:
    images = random(20, *shape)
    for key in (0, 12345, -(2**62)):
        expected = seen(images.numpy(), key, how)
        assert np.array_equal(augmented(images, torch.tensor(key), how).numpy(), expected)


@pytest.mark.parametrize(("how", "shape"), CASES)
def test_stacked_clients_see_what_each_sees_alone(how: Augment, shape: tuple[int, ...]) -> None:
    images, keys = random(3, 6, *shape), torch.tensor([5, -6, 7])

    alone = [augmented(own, key, how) for own, key in zip(images, keys, strict=True)]
    assert torch.equal(augmented(images, keys, how), torch.stack(alone))
    by_vmap = torch.func.vmap(lambda own, key: augmented(own, key, how))(images, keys)
    assert torch.equal(by_vmap, torch.stack(alone))


def test_every_window_is_as_likely_and_mirroring_is_apart_from_it() -> None:
    """Of n draws among k outcomes each comes n/k times, up to 5 standard deviations."""
    samples, crop = 18 * 2000, 1
    image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], dtype=torch.float64).expand(samples, 1, 2, 2)
    windows = augmented(image, torch.tensor(99), Augment(flip=True, crop=crop))
    _, counts = torch.unique(windows.flatten(1), dim=0, return_counts=True)
    counts = counts.double()
    expected = samples / 18
    likely = counts / expected  # (0, 3, 0, 0) is also (3, 0, 0, 0) mirrored: twice as likely as (1, 2, 3, 4)
    rounded = likely.round()
    assert rounded.sum() == 18
    spread = (rounded * expected * (1 - rounded / 18)).sqrt()
    assert bool(((counts - rounded * expected).abs() < 5 * spread).all())


def test_steps_and_samples_differ() -> None:
    image = random(1, 3, 8, 8).expand(64, 3, 8, 8)
    first, second = (augmented(image, torch.tensor(key), Augment(flip=True, crop=4)) for key in (1, 2))
    assert len(torch.unique(first.flatten(1), dim=0)) > 40
    assert (first == second).flatten(1).all(1).float().mean() < 0.1


def test_padding_a_minibatch_changes_nothing() -> None:
    images, how = random(9, 1, 4, 4), Augment(flip=True, crop=2)
    whole = augmented(images, torch.tensor(3), how)
    assert torch.equal(augmented(images[:5], torch.tensor(3), how), whole[:5])


@pytest.mark.parametrize("fixed", [False, True])
def test_training_sees_new_pixels_in_every_epoch(fixed: bool) -> None:
    """Three epochs of descent are those of a loop over brute-force windows: nothing is computed once for all epochs.

    Without augmentation the first layer is trained in the span of its inputs, or, fixed, its features are computed
    once.
    """
    how, key = Augment(flip=True, crop=1, black=(0.25,)), torch.tensor([11, 12, 13])
    net = Net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)))
    net = net.to(torch.device("cpu"), torch.float64)
    start = {name: value.double() for name, value in net.init(rng.generator("test")).items()}
    held = {name: value for name, value in start.items() if fixed and name.startswith("1.")}
    trained = {name: value for name, value in start.items() if name not in held}
    x, y, rows = random(6, 1, 6, 6), torch.arange(6) % 3, torch.arange(6).repeat(3, 1)
    batches = Batches(x, y, rows, torch.ones(3, 6, dtype=torch.bool), key, Padding(gaps=False, most=6), how)
    optimizer = Sgd(lr=0.3).at(torch.tensor(0.0))
    objective = MeanLoss(net, cross_entropy, held)
    with enabled():
        found, _ = descend(objective, trained, batches, optimizer)

    params = {name: value.clone().requires_grad_() for name, value in trained.items()}
    for step in range(3):
        pixels = torch.from_numpy(seen(x.numpy(), int(key[step]), how)).flatten(1)
        values = params | held
        hidden = torch.relu(pixels @ values["1.weight"].T + values["1.bias"])
        scores = hidden @ values["3.weight"].T + values["3.bias"]
        loss = nn.functional.cross_entropy(scores, y)
        gradient = torch.autograd.grad(loss, list(params.values()))
        pairs = zip(params.items(), gradient, strict=True)
        params = {name: (value - 0.3 * slope).detach().requires_grad_() for (name, value), slope in pairs}
    for name, value in params.items():
        assert torch.allclose(found[name], value, atol=1e-14), name
    plain, _ = descend(objective, trained, batches._replace(augment=Augment()), optimizer)
    assert math.sqrt(sum(float((plain[name] - found[name]).square().sum()) for name in trained)) > 1e-3
