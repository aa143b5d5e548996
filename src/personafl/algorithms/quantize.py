"""Quantization of one weight tensor x to m learned values, the centers c_1 ≤ … ≤ c_m (K. Ozkara et al., QuPeD, 2021).

    Q_c(x)_i = the center nearest to x_i                                        `nearest`, `hard`
    Q̃_c(x)_i = c_1 + Σ_{j≥2} (c_j − c_{j−1})·σ(P(x_i − (c_j + c_{j−1})/2))      `soft`, appendix A.4
    R(x, c)  = ½ Σ_i |x_i − Q_c(x)_i|

The two proxes are of R in x (`prox_weights`, eq. 11) and of R in c (`prox_centers`, appendix D.1, the sign of whose
printed form is corrected here). The members of a center are the entries nearest to it.

All functions are pure and run under vmap and grad; centers come sorted and in the dtype of x.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from personafl.core.split import listed
from personafl.core.wire import Quantized
from personafl.errors import BadInput

FullPrecision = Literal["ends", "output", "none"]  # the layers that are not quantized

_FEW = 4  # up to so many centers, a pass for each is faster than looking up and adding up by places


def nearest(x: Tensor, centers: Tensor) -> Tensor:
    """Return codes, int64 in the shape of x: the place of the nearest center, the lower one of two as near."""
    borders = (centers[1:] + centers[:-1]) / 2
    # The zeros stack x where only the centers are stacked; searchsorted would take it expanded, and warn.
    flat = x.reshape(-1) + torch.zeros_like(centers[:1])
    return torch.searchsorted(borders, flat).reshape(x.shape)


class Cells(NamedTuple):
    """Whose member each entry of x is, for all that is asked of it: the codes, or for few centers 0s and 1s."""

    levels: int  # m
    codes: Tensor | None
    above: tuple[Tensor, ...]  # in the shape and dtype of x: whether an entry is above the border of centers j, j + 1

    @classmethod
    def of(cls, x: Tensor, centers: Tensor) -> Self:
        """Find them."""
        x = x.detach()
        if not 1 < len(centers) <= _FEW:
            return cls(len(centers), nearest(x, centers), ())
        # Passes of plain arithmetic: comparing, choosing and looking up take a CPU several times as long.
        borders = ((centers[1:] + centers[:-1]) / 2).unbind()
        return cls(len(centers), None, tuple((x - border).sign().clamp(min=0) for border in borders))

    def pick(self, values: Tensor) -> Tensor:
        """Return, in the shape of x, the value [m] that stands at the place of each entry's center."""
        if self.codes is not None:
            return values[self.codes]
        result = values[0] + torch.zeros_like(self.above[0])
        for above, value in zip(self.above, values[1:].unbind(), strict=True):
            result = torch.lerp(result, value, above)  # one of the two, exactly
        return result

    def sums(self, values: Tensor) -> Tensor:
        """Return [m] sums of values in the shape of x over the members of each center, in float64.

        Those of whole numbers are exact, in whatever order they are added.
        """
        if self.codes is not None:
            zeros = torch.zeros(self.levels, dtype=torch.float64, device=values.device)
            return zeros.index_put((self.codes,), values.to(torch.float64), accumulate=True)
        parts = [(values * above).sum(dtype=torch.float64) for above in self.above]
        return _steps(torch.stack([values.sum(dtype=torch.float64), *parts]))

    def members(self) -> Tensor:
        """Return how many entries each center has, [m], in float64."""
        if self.codes is not None:
            return self.sums(torch.ones_like(self.codes))
        parts = [above.sum(dtype=torch.float64) for above in self.above]
        return _steps(torch.stack([torch.full_like(parts[0], self.above[0].numel()), *parts]))

    def sides(self, x: Tensor, centers: Tensor) -> Tensor:
        """Return how many members more are above each center than below it, [m]."""
        return self.sums((x - self.pick(centers)).sign()).to(centers.dtype)


def _steps(from_each: Tensor) -> Tensor:
    """Return what is at each place, [m], from what is there and at all later ones."""
    return from_each - functional.pad(from_each[1:], (0, 1))


def hard(x: Tensor, centers: Tensor) -> Tensor:
    """Return Q_c(x). Its gradient is 0 in x; in c_j it is the sum of the incoming one over the members of c_j.

    That is what the paper's reference runs use for Q̃ (P → ∞).
    """
    return Cells.of(x, centers).pick(centers)


def soft(x: Tensor, centers: Tensor, sharpness: float | Tensor) -> Tensor:
    """Return Q̃_c(x), smooth in x and c; sharpness = P, and P → ∞ is `hard` (half-way between centers, their mean)."""
    result = centers[0].expand_as(x)
    for low, high in pairwise(centers.unbind()):  # one step at a time: [m − 1, *x.shape] is made only for gradients
        result = result + (high - low) * torch.sigmoid(sharpness * (x - (high + low) / 2))
    return result


def prox_weights(x: Tensor, centers: Tensor, width: float | Tensor) -> Tensor:
    """Return the prox of width·R(·, c): a step of width/2 towards the nearest center, onto it if it is that near.

    R is not convex, but this is a global minimiser of width·R(y, c) + ½‖y − x‖² everywhere: an entry's minimum with a
    given center is the Huber function of their distance, which increases, so that the nearest center is best. The
    minimiser is unique but for entries half-way between two centers; there it jumps, and the lower center is taken.
    """
    center = hard(x, centers)
    offset, step = x - center, width / 2
    return torch.where(offset.abs() <= step, center, x - offset.clamp(-step, step))  # type: ignore[arg-type]


def prox_centers(
    centers: Tensor, x: Tensor, width: float | Tensor, at: Tensor | None = None, cells: Cells | None = None
) -> Tensor:
    """Return the prox of width·R(x, ·) linearised in c: c_j + (width/2)·(#{members > at_j} − #{members < at_j}).

    `centers` is μ, after the gradient step; `at` are the centers before it, which say whose member an entry is and on
    which side (default: μ); `cells` are theirs, if known. `width` may be one for each center, [m]. Entries on their
    center count for neither side, a center without members stays at μ.

    The linear model has no median to stop at. The result is that of the exact prox, with these members, where none of
    them lies between at_j and the place where c_j lands, at_j included; elsewhere c_j goes too far: over members that
    it passes, whose pull turns round, and off those that are on it, which would hold it with up to width/2 each. The
    printed form has the other sign, which pushes centers away from their median, against its own derivation.

    The result may be out of order where centers are close: see `sorted_centers`.
    """
    at = centers if at is None else at
    cells = Cells.of(x, at) if cells is None else cells
    return centers + width / 2 * cells.sides(x, at)


def sorted_centers(centers: Tensor) -> Tensor:
    """Return the centers in order, as all functions want them. Codes that are kept fixed would lose their meaning."""
    return centers.sort().values


def initial_centers(x: Tensor, levels: int) -> Tensor:
    """Return m = levels centers, strictly increasing: for m > 2 evenly from min x to max x.

    For m = 2 they are the means of the negative and of the non-negative entries; where one kind is missing, of those
    below the mean and the others. Around entries that are all the same, to rounding, centers spread by ± √ε of their
    size (of 1 for zeros).
    """
    low, high = _means_of_sides(x) if levels == 2 else (x.amin(), x.amax())
    size = torch.maximum(low.abs(), high.abs())
    limits = torch.finfo(x.dtype)
    hair = limits.eps**0.5 * torch.where(size > limits.tiny / limits.eps, size, 1)
    close = high - low < hair
    ends = torch.where(close, low - hair, low), torch.where(close, high + hair, high)
    return torch.lerp(*ends, torch.linspace(0, 1, levels, dtype=x.dtype, device=x.device))


def _means_of_sides(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the negative entries and that of the others, or of those below the mean and the others."""
    both = (x < 0).any() & (x >= 0).any()
    border = torch.where(both, 0, x.mean())

    def mean(chosen: Tensor) -> Tensor:
        return torch.where(chosen.any(), torch.where(chosen, x, 0).sum() / chosen.sum().clamp(min=1), border)

    return mean(x < border), mean(x >= border)


def quantizable(shapes: Mapping[str, torch.Size], full: FullPrecision = "ends") -> tuple[str, ...]:
    """Return the names of the parameters to quantize: every weight of ≥ 2 dimensions but those of the layers in `full`.

    `full` is the first and the last layer ("ends"), the last ("output") or none. `shapes` has the parameters in the
    order in which the network registers them (`Net.shapes`), which says what is first and last, as it does for the
    parts `input` and `output`. Vectors (biases, norms) stay in full precision, and so does what the network holds
    beside its layers (a class token). An adapter goes with the layer it belongs to.
    """
    weights = {name: _layer(name) for name, shape in shapes.items() if len(shape) >= 2 and "." in name}
    layers = [layer for name, layer in weights.items() if "adapter" not in name.split(".")]
    kept = {"ends": layers[:1] + layers[-1:], "output": layers[-1:], "none": []}[full]
    chosen = tuple(name for name, layer in weights.items() if layer not in kept)
    if not chosen:
        found = listed(list(dict.fromkeys(layers))) or "none"
        stay = {"ends": "the first and the last one", "output": "the last one", "none": "vectors"}[full]
        raise BadInput(
            f"model: it has no layer to quantize, since {stay} stay in full precision (layers with weights: {found}); "
            "take a deeper model, quantize more of it (quped's full_precision), or leave this one in full precision"
        )
    return chosen


def _layer(name: str) -> str:
    """Return the layer of a parameter; of an adapter's parameter the layer that has the adapter."""
    path = name.split(".")[:-1]
    return ".".join(path[: path.index("adapter")] if "adapter" in path else path)


def pack(x: Tensor, centers: Tensor) -> Quantized:
    """Return Q_c(x) as it is stored and sent: ⌈log₂ m⌉ bits an entry, and the centers."""
    return Quantized.of(nearest(x, centers), centers)
