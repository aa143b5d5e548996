"""What a language model writes: the continuation of a prompt, one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from personafl.core.shape import DataShape
from personafl.data.sources.tokens import Tokens, tokens_in
from personafl.errors import BadInput


def text_tokens(where: str, shape: DataShape, tokenizer: str | None) -> Tokens:
    """Return the tokens of a model that writes text, or say that it is none; `where` begins the message."""
    if shape.task != "next-token":
        raise BadInput(
            f"{where}: is for the task {shape.task}, and only a language model continues a prompt; give data"
        )
    if tokenizer is None:
        raise BadInput(
            f"{where}: was trained without a tokenizer, data.tokenizer; apply the network to tokens in Python"
        )
    return tokens_in(tokenizer)


@torch.no_grad()
def continuation(
    network: nn.Module,
    tokens: Tokens,
    prompt: str,
    *,
    length: int,
    most: int = 100,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """Return what follows a prompt, at most so many tokens, until the end of the text.

    Each token is the most probable one, or with a temperature T drawn from softmax(scores / T); the network sees the
    last `length` tokens. An empty prompt stands for the beginning of a text: what follows the end of another one.
    """
    if not temperature >= 0 or most < 1:
        raise BadInput(f"temperature = {temperature}, tokens = {most}: give 0 or more, and at least 1 token")
    before = tokens.encode([prompt])[0] or ([] if tokens.end is None else [tokens.end])
    if not before:
        raise BadInput("prompt: has no tokens; write a word")
    draws, written = torch.Generator().manual_seed(seed % 2**64), list(before)
    for _ in range(most):
        scores = _scores(network, tokens, written[-length:])
        if temperature > 0:  # less the greatest, for a quotient may be infinite
            share = ((scores - scores.max()) / temperature).softmax(-1)
            token = int(torch.multinomial(share, 1, generator=draws))
        else:
            token = int(scores.argmax())
        if token == tokens.end:
            break
        written.append(token)
    return tokens.decode(written).removeprefix(tokens.decode(before))


def _scores(network: nn.Module, tokens: Tokens, seen: list[int]) -> Tensor:
    """Return the scores of what may follow, [tokens]."""
    try:
        scores: Tensor = network(torch.tensor([seen]))[0, -1].to(torch.float64)
    except IndexError:
        raise BadInput(
            f"{tokens.where}: has tokens that the model does not know; put back the tokenizer of its training data"
        ) from None
    if not scores.max() < torch.inf:
        raise BadInput("model: its scores are not finite, for its training diverged; take another model")
    return scores
