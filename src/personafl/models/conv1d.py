"""GPT-2's linear layer with an adapter: `transformers`' Conv1D, whose weight is [in, out]."""

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class AdaptedConv1D(Conv1D):
    """xW + b + adapter(x)."""

    adapter: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output to the layer's, [..., out]."""
        y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        result: Tensor = y + self.adapter(x)
        return result.to(y.dtype)
