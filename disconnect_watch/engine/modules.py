"""Parts that Gemma has in a form of its own."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["OffsetNorm", "ScaledEmbedding"]


class OffsetNorm(nn.RMSNorm):
    """An RMS norm whose weight is stored less one; in float32, where adding one loses nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm ``x`` [..., normalized_shape], and return it in its own dtype."""
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).type_as(x)


class ScaledEmbedding(nn.Embedding):
    """Embeddings times the root of their size, which is rounded to the dtype of the weights."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch calls it so
        """Look up ``input`` [num_tokens]; returns [num_tokens, embedding_dim]."""
        scale = torch.tensor(self.embedding_dim**0.5, dtype=self.weight.dtype)
        return super().forward(input) * scale
