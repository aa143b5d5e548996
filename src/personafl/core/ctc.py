"""CTC (A. Graves et al. 2006), for sequences whose alignment with the input is unknown, and word error rates.

Class 0 is the blank, and every frame's output counts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

BLANK = 0
# log 0 in CTC's recursion: finite, so that the gradient of log-sum-exp over unreachable states is not 0/0.
_IMPOSSIBLE = -1e30


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


def word_error(outputs: Tensor, targets: Tensor, space: int | None = None) -> Tensor:
    """Return the word error rate of samples: wrong words / words of all together; above 1 if many are too many."""
    total = word_edits(outputs, targets, space).sum(1)
    return total[0] / total[1]
