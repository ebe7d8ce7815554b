"""The projection to classes and its cross entropy in one, the logits never kept whole."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn._checks import check_count, check_floating, check_probability, describe
from fastattn.functional import linear_cross_entropy


class LinearCrossEntropy(nn.Module):
    """cross_entropy(hidden @ weight^T + bias, target), with its own matrix or one tied to another.

    ``weight`` [V, D] and ``bias`` [V] are named and initialised as those of ``torch.nn.Linear``.

    Args:
        in_features: D.
        num_classes: V.
        bias: whether there is a ``bias``.
        weight: a parameter [V, D] to use instead of an own one, such as an embedding's: it is the
            same parameter, not a copy.
        label_smoothing: eps, from 0 to 1.
        smoothing: "uniform" (as torch: eps / V for every class) or "exclusive" (as the paper's
            authors: eps / (V - 1) for every class but the target).
        ignore_index: tokens with this target count for nothing.
        reduction: "mean", "sum" or "none", as in ``torch.nn.CrossEntropyLoss``.
        class_weight: [V], a buffer of that name.
        return_nll: also return the un-smoothed loss, by the same reduction, without gradient.
        device, dtype: of the parameters that the module makes.

    Raises:
        TypeError, ValueError: in one sentence that names the argument.
    """

    bias: nn.Parameter | None
    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        weight: nn.Parameter | None = None,
        label_smoothing: float = 0.0,
        smoothing: str = "uniform",
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Tensor | None = None,
        return_nll: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("in_features", in_features)
        check_count("num_classes", num_classes)
        check_probability("label_smoothing", label_smoothing)
        _check_word("smoothing", smoothing, ("uniform", "exclusive"))
        _check_word("reduction", reduction, ("mean", "sum", "none"))
        self.in_features = in_features
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self.smoothing = smoothing
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.return_nll = return_nll

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        if weight is None:
            self.weight = parameter(num_classes, in_features)
        else:
            _check_tied(weight, num_classes, in_features)
            self.weight = weight
        self.register_parameter("bias", parameter(num_classes) if bias else None)
        if class_weight is not None:
            _check_class_weight(class_weight, num_classes)
        self.register_buffer("class_weight", class_weight)
        self._reset_parameters(own_weight=weight is None)

    def _reset_parameters(self, own_weight: bool) -> None:
        if own_weight:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """hidden [..., D], target [...] int64 -> the loss, a scalar or with "none" [...].

        With ``return_nll`` a pair, the un-smoothed loss second.

        Raises:
            TypeError, ValueError, IndexError: as ``fastattn.linear_cross_entropy``.
        """
        return linear_cross_entropy(
            hidden,
            self.weight,
            target,
            bias=self.bias,
            class_weight=self.class_weight,
            label_smoothing=self.label_smoothing,
            smoothing=self.smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            return_nll=self.return_nll,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> [..., V], for predictions."""
        return F.linear(hidden, self.weight, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, "
            f"bias={self.bias is not None}, label_smoothing={self.label_smoothing}, "
            f"smoothing={self.smoothing!r}, reduction={self.reduction!r}"
        )


def _check_word(name: str, word: str, accepted: tuple[str, ...]) -> None:
    if word not in accepted:
        raise ValueError(f"{name} is {word!r}; {', '.join(map(repr, accepted))} is accepted")


def _check_tied(weight: nn.Parameter, num_classes: int, in_features: int) -> None:
    if not isinstance(weight, nn.Parameter):
        raise TypeError(f"weight is {describe(weight)}; a torch.nn.Parameter is accepted")
    if tuple(weight.shape) != (num_classes, in_features):
        raise ValueError(
            f"weight is {describe(weight)}; [num_classes, in_features] = "
            f"{(num_classes, in_features)} is accepted"
        )


def _check_class_weight(class_weight: Tensor, num_classes: int) -> None:
    check_floating("class_weight", class_weight)
    if tuple(class_weight.shape) != (num_classes,):
        raise ValueError(
            f"class_weight is {describe(class_weight)}; [num_classes] = ({num_classes},) "
            "is accepted"
        )
