"""Losses and scores per sample; a sequence counts by its valid tokens (targets ≥ 0).

A `Task` joins the loss that is trained with the score that is reported. CTC (A. Graves et al. 2006) is for sequences
whose alignment with the input is unknown: class 0 is the blank, and every frame's output counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from personafl.core.batches import Batch
from personafl.core.net import Net
from personafl.core.seam import replaceable
from personafl.core.tree import Params

BLANK = 0
# log 0 in CTC's recursion: finite, so that the gradient of log-sum-exp over unreachable states is not 0/0.
_IMPOSSIBLE = -1e30


@replaceable
def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [batch] cross-entropies: outputs [batch, classes], targets [batch]; or sequences.

    For sequences outputs are [batch, length, classes] and targets [batch, length] (or more axes than length).
    """
    labels = targets if targets.ndim == 1 else targets.clamp(min=0)
    losses = functional.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="none").reshape(labels.shape)
    return losses if targets.ndim == 1 else mean_of_valid(losses, targets >= 0)


@replaceable
def divergence(teacher: Tensor, pupil: Tensor) -> Tensor:
    """Return KL(softmax(teacher) ‖ softmax(pupil)) per sample [batch], of scores [batch, …, classes]."""
    log_p, log_q = functional.log_softmax(teacher, -1), functional.log_softmax(pupil, -1)
    entries = (log_p.exp() * (log_p - log_q)).sum(-1)  # [batch, …]
    return entries.reshape(len(entries), -1).mean(-1)


@replaceable
def mean_of_real(values: Tensor, batch: Batch) -> Tensor:
    """Return the mean of values [batch] of the real samples; 0 when there are none."""
    return torch.where(batch.real, values, 0.0).sum() / batch.real.sum().clamp(min=1)


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [batch] shares of correct predictions: 0 or 1 for a label, the share of valid tokens for a sequence."""
    hit = (outputs.argmax(-1) == targets).to(torch.float32)
    if targets.ndim == 1:
        return hit
    return mean_of_valid(hit, targets >= 0)


def mean_of_valid(values: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid tokens of each sample, [batch, …] -> [batch]; 0 when there are none."""
    return torch.where(valid, values, 0.0).flatten(1).sum(1) / valid.flatten(1).sum(1).clamp(min=1)


def ctc_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [batch] negative log-likelihoods −log Σ_π Π_t p_t(π_t) over all alignments π of the target.

    outputs are scores [batch, frames, classes], targets [batch, length] classes ≥ 1, then −1. With the target's states
    s = blank, y₁, blank, y₂, …, blank (2·length + 1 of them) the forward recursion is

        α_t(s) = p_t(s) · (α_{t−1}(s) + α_{t−1}(s−1) + α_{t−1}(s−2) if s is a label other than s−2's)

    in logarithms, and the likelihood α_T(last blank) + α_T(last label). A target with no alignment (too few frames)
    has loss ∞ and gradient 0. Plain operations, so it stacks under vmap and grad, unlike torch's own.
    """
    batch, frames, _ = outputs.shape
    blanks = torch.full_like(targets, BLANK)
    states = torch.stack([blanks, targets.clamp(min=BLANK)], -1).flatten(1)
    states = functional.pad(states, (0, 1), value=BLANK)  # [batch, 2·length + 1]
    before = functional.pad(states, (2, 0), value=BLANK)[:, :-2]  # the state two before
    skips = (states != BLANK) & (states != before)
    every = states.unsqueeze(1).expand(batch, frames, states.shape[1])
    emitted = outputs.log_softmax(-1).gather(2, every)  # [batch, frames, states] log p_t(s)

    place = torch.arange(states.shape[1], device=outputs.device)
    alpha = torch.where(place < 2, emitted[:, 0], _IMPOSSIBLE)
    for frame in range(1, frames):
        one, two = (functional.pad(alpha, (back, 0), value=_IMPOSSIBLE)[:, : len(place)] for back in (1, 2))
        ways = torch.stack([alpha, one, torch.where(skips, two, _IMPOSSIBLE)])
        alpha = emitted[:, frame] + ways.logsumexp(0)

    last = 2 * (targets >= 0).sum(1, keepdim=True)  # [batch, 1] the state of the last blank
    label = torch.where(last > 0, alpha.gather(1, (last - 1).clamp(min=0)), _IMPOSSIBLE)
    total = torch.logaddexp(alpha.gather(1, last), label).squeeze(1)
    return torch.where(total > _IMPOSSIBLE / 2, -total, torch.inf)


def ctc_frames(targets: Tensor) -> Tensor:
    """Return [batch] how many frames a target [batch, length] needs: its length, and a blank between equal labels."""
    repeats = (targets[:, 1:] == targets[:, :-1]) & (targets[:, 1:] >= 0)
    return (targets >= 0).sum(1) + repeats.sum(1)


def ctc_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return [batch], 1 where the greedy decoding is exactly the target, else 0."""
    decoded = _collapsed(outputs)
    width = max(decoded.shape[1], targets.shape[1])
    decoded, wanted = (functional.pad(s, (0, width - s.shape[1]), value=-1) for s in (decoded, targets))
    return (decoded == wanted).all(1).to(torch.float32)


def _collapsed(outputs: Tensor) -> Tensor:
    """Return the greedy decodings of [batch, frames, classes] as [batch, frames] classes, padded with −1."""
    best = outputs.argmax(-1)
    frames = best.shape[1]
    kept = (best != BLANK) & (best != functional.pad(best, (1, 0), value=BLANK)[:, :frames])
    place = torch.where(kept, kept.cumsum(1) - 1, frames)  # what is dropped goes to one column more
    empty = torch.full_like(functional.pad(best, (0, 1)), -1)
    return empty.scatter(1, place, best)[:, :frames]


@replaceable
def word_edits(outputs: Tensor, targets: Tensor, space: int | None = None) -> Tensor:
    """Return [2, batch]: the word edits from the greedy decodings to the targets, and the targets' words.

    `space` is the class between words; None: each is one word. Σ edits / Σ words is the word error rate.
    """
    found, wanted = ([_words(_classes(row), space) for row in rows.cpu()] for rows in (_collapsed(outputs), targets))
    edits = [edit_distance(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)]
    return torch.tensor([edits, [len(words) for words in wanted]], dtype=torch.float64, device=outputs.device)


def edit_distance(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the fewest insertions, deletions and substitutions that turn one sequence into the other."""
    row = list(range(len(other) + 1))
    for i, mine in enumerate(one, start=1):
        above, row = row, [i]
        for j, its in enumerate(other, start=1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (mine != its)))
    return row[-1]


def _classes(row: Tensor) -> list[int]:
    classes: list[int] = row[row >= 0].tolist()
    return classes


def _words(classes: list[int], space: int | None) -> list[tuple[int, ...]]:
    words: list[list[int]] = [[]]
    for label in classes:
        if label == space:
            words.append([])
        else:
            words[-1].append(label)
    return [tuple(word) for word in words if word]


@dataclass(frozen=True)
class Task:
    """What is learned: the loss [batch] that is trained, and the score [batch] in [0, 1] that is reported.

    Where targets are words, `edits` also counts wrong words, given the class between words, if there is one.
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    correct: Callable[[Tensor, Tensor], Tensor]
    edits: Callable[..., Tensor] | None = None  # (outputs, targets, space) -> [2, batch]


TASKS = {
    task.name: task
    for task in (
        Task("classification", cross_entropy, correct),  # outputs [batch, classes], targets [batch]
        Task("next-token", cross_entropy, correct),  # outputs [batch, length, classes], targets [batch, length]
        Task("ctc", ctc_loss, ctc_correct, word_edits),  # outputs [batch, frames, classes], targets [batch, length]
    )
}


Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [batch, …], targets [batch, …]) -> losses [batch]


@dataclass(frozen=True, eq=False)
class MeanLoss:
    """f(w; B), the mean of a network's losses over the real samples of a batch; or of its other parameters, some fixed.

    A function like any other. Training that sees it is one of these knows what it computes, and may do so cheaper.
    """

    net: Net
    loss: Loss
    fixed: Params = field(default_factory=dict)

    @replaceable
    def __call__(self, params: Params, batch: Batch) -> Tensor:
        """Return f."""
        losses = self.loss(self.net.apply(self.fixed | params, batch.x, batch.real, batch.key), batch.y)
        return mean_of_real(losses, batch)
