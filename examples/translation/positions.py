"""What tells the model a token's place: sinusoids, or learned rows (paper section 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.translation.config import ModelConfig


class SinusoidalPositions(nn.Module):
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(same) (section 3.5).

    The table grows with the longest sequence seen.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.register_buffer("table", self._rows(256, config.d_model), persistent=False)

    def forward(self, length: int, start: int = 0) -> Tensor:
        """Rows start .. start + length: [length, d]."""
        end = start + length
        if end > len(self.table):
            grown = self._rows(max(end, 2 * len(self.table)), self.table.shape[1])
            self.table = grown.to(self.table)
        return self.table[start:end]

    @staticmethod
    def _rows(length: int, width: int) -> Tensor:
        exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
        position = torch.arange(length, dtype=torch.float64)
        angle = position[:, None] / 10000**exponent
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).float()


class LearnedPositions(nn.Module):
    """One learned row a position (Table 3, row E)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.table = nn.Parameter(torch.empty(config.max_positions, config.d_model))

    def forward(self, length: int, start: int = 0) -> Tensor:
        """Rows start .. start + length: [length, d]. Raises ValueError beyond the last row."""
        end = start + length
        if end > len(self.table):
            raise ValueError(
                f"a sequence of {end} tokens, but the model has {len(self.table)} learned "
                "positions (max_positions): shorten the input or use positions = 'sinusoidal'"
            )
        return self.table[start:end]
