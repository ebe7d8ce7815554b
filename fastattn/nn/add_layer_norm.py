"""Residual connection, dropout and layer normalization (Vaswani et al. 2017, section 5.4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastattn._checks import check_count, check_probability
from fastattn.functional import add_layer_norm


class AddLayerNorm(nn.LayerNorm):
    """LayerNorm(residual + dropout(x)) over the last dimension.

    Parameters, initial values and ``state_dict`` are those of ``torch.nn.LayerNorm``.

    Args:
        normalized_shape: N, the last dimension.
        dropout: of x before the sum, in training only.
        eps: added to the biased variance.
        elementwise_affine: whether there is a ``weight`` [N] (and with ``bias`` a ``bias`` [N]).
        return_sum: also return residual + dropout(x), as pre-norm blocks need.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: in one sentence that names the argument.
    """

    def __init__(
        self,
        normalized_shape: int,
        *,
        dropout: float = 0.0,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        return_sum: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("normalized_shape", normalized_shape)
        check_probability("dropout", dropout)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.dropout = dropout
        self.return_sum = return_sum

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., N], residual of x's shape or None (then LayerNorm(dropout(x))).

        Returns:
            [..., N] in x's dtype, or (that, residual + dropout(x)) with ``return_sum``.

        Raises:
            TypeError, ValueError: in one sentence that names the argument.
        """
        return add_layer_norm(
            x,
            residual,
            self.weight,
            self.bias,
            dropout_p=self.dropout if self.training else 0.0,
            eps=self.eps,
            return_sum=self.return_sum,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout={self.dropout}, return_sum={self.return_sum}"
