"""A small decoder-only transformer over bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Decoder", "ModelConfig"]

NUM_BYTE_VALUES = 256


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        width: Length of the vector at each position; a multiple of ``num_heads``.
        num_layers: Number of decoder blocks.
        num_heads: Attention heads per block.
        context: Longest sequence, in bytes.
    """

    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    context: int = 64

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is no multiple of {self.num_heads} heads")


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each behind a norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width)
        self.mlp_down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[sequences, length, width]`` to the same shape."""
        x = x + self._attend(self.attention_norm(x))
        hidden: torch.Tensor = self.mlp_down(functional.gelu(self.mlp_up(self.mlp_norm(x))))
        return x + hidden

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        sequences, length, width = x.shape
        heads = self.qkv(x).view(sequences, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.attention_out(
            mixed.transpose(1, 2).reshape(sequences, length, width)
        )
        return out


class Decoder(nn.Module):
    """Predict the next byte at every position.

    Args:
        config: Sizes. Weights come from torch's global random state.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(NUM_BYTE_VALUES, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, NUM_BYTE_VALUES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens ``[sequences, length]`` to logits ``[sequences, length, 256]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
