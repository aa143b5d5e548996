"""Transformers: a causal language model, and a speech model for CTC. Pre-norm blocks with sites for adapters.

Attention is written out, since torch's fused kernels do not stack over clients (vmap).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from personafl.models.adapters import Site
from personafl.models.zoo import Share, Size

START = 0.02  # standard deviation of embeddings at the start, as in BERT and GPT-2


class TransformerBlock(nn.Module):
    """x + site(attention(norm(x))), then x + site(mlp(norm(x)))."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width = {width} is not a multiple of heads = {heads}; change one of them")
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden_in, self.hidden_out = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.site1, self.site2 = Site(width), Site(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, width] to the same shape."""
        x = x + self.site1(self.dropout1(self._attend(self.norm1(x))))
        hidden = functional.gelu(self.hidden_in(self.norm2(x)))
        result: Tensor = x + self.site2(self.dropout2(self.hidden_out(hidden)))
        return result

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        size = width // self.heads
        q, k, v = self.attention_in(x).reshape(batch, length, 3, self.heads, size).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(size)  # [batch, heads, length, length]
        if self.causal:
            future = x.new_ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        mixed = scores.softmax(-1) @ v  # [batch, heads, length, size]
        result: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class LanguageModel(nn.Module):
    """Causal transformer for the next token; BERT-mini's size is width=256 hidden=1024 blocks=4.

    Embeddings, causal blocks, and the token embeddings again as the head:
    score of token c at place t = ⟨norm(h_t), e_c⟩ + b_c with e the embeddings of the input: the two largest matrices
    of a word model are one, which gives FedAlt/FedSim's 5.7M parameters at BERT-mini's size.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        vocabulary: int,
        classes: int,
        *,
        width: Size = 64,
        heads: Size = 4,
        hidden: Size = 256,
        blocks: Size = 2,
        dropout: Share = 0.0,
    ) -> None:
        super().__init__()
        if classes > vocabulary:
            raise ValueError(f"it predicts its own tokens, but there are {classes} classes for {vocabulary} tokens")
        self.classes = classes
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(input_shape[0], width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=START)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, hidden, dropout, causal=True) for _ in range(blocks))
        )
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(classes))
        # The paper's personal layers: whole blocks, because the embedding, which is the head, is large.
        self.parts = {"input": ("blocks.0.*",), "output": (f"blocks.{blocks - 1}.*",)}

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, length] to scores [batch, length, classes]; place t sees tokens s ≤ t."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight[: self.classes], self.bias)


class SpeechModel(nn.Module):
    """Convolutions, then a transformer; for CTC. Librispeech: width=384 heads=6 hidden=1536 blocks=6 strides=[2, 2].

    Log-mel frames to scores of characters per frame: two 1-D convolutions, then blocks.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        *,
        width: Size = 64,
        heads: Size = 4,
        hidden: Size = 256,
        blocks: Size = 2,
        strides: tuple[Size, Size] = (2, 1),
        dropout: Share = 0.0,
    ) -> None:
        super().__init__()
        if len(input_shape) != 3 or input_shape[0] != 1:
            raise ValueError("it is for log-mel spectra [1, bands, frames]; use mlp or another model")
        (_, bands, frames), (first, second) = input_shape, strides
        self.subsample = nn.Sequential(
            nn.Conv1d(bands, width, 5, first, 2), nn.GELU(), nn.Conv1d(width, width, 5, second, 2), nn.GELU()
        )
        self.positions = nn.Embedding(math.ceil(math.ceil(frames / first) / second), width)
        nn.init.normal_(self.positions.weight, std=START)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, hidden, dropout, causal=False) for _ in range(blocks))
        )
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, classes)
        # The paper's: the subsampling, and the last block's second linear layer.
        self.parts = {"input": ("subsample.*",), "output": (f"blocks.{blocks - 1}.hidden_out.*",)}

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, 1, bands, frames] to scores [batch, ⌈⌈frames / stride⌉ / stride⌉, classes]; class 0 is blank."""
        features = self.subsample(x.squeeze(1)).transpose(1, 2)  # [batch, fewer frames, width]
        places = torch.arange(features.shape[1], device=x.device)
        features = self.dropout(features + self.positions(places))
        scores: Tensor = self.output(self.norm(self.blocks(features)))
        return scores
