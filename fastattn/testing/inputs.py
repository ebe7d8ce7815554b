"""Makers of inputs: seeded numbers in every memory layout a caller may come with."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded")


class Inputs:
    """Numbers from one seeded generator: a test draws the same in whatever order it runs."""

    def __init__(self, seed: int = 0, device: torch.device | str = "cpu"):
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.device = torch.device(device)

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous"
    ) -> Tensor:
        """Standard normal numbers, rounded to ``dtype``, in the given memory ``layout``."""
        numbers = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return with_layout(numbers.to(self.device, dtype), layout)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers from 0 to 1, 1 excluded before rounding."""
        numbers = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return numbers.to(self.device, dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 from ``low`` to ``high`` - 1."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def bools(self, *shape: int, true: float = 0.5) -> Tensor:
        """True with probability ``true``."""
        return (torch.rand(shape, generator=self.generator) < true).to(self.device)

    def rng_state(self) -> Tensor:
        """A seed and an offset that use all the bits they may."""
        return self.integers(-(2**63), 2**63 - 1, 2)


def with_layout(x: Tensor, layout: str) -> Tensor:
    """The values of ``x`` in other memory.

    "transposed": the last two dimensions swapped in memory; "strided": the last stride is 3;
    "offset": a view one element into a bigger tensor, rows apart; "expanded": stride 0 over the
    first dimension longer than 1 (whose first entry is repeated, so values do change). What lies
    between the elements is NaN.
    """
    if layout == "contiguous" or x.dim() == 0:
        return x.contiguous()
    if layout == "transposed":
        return x.mT.contiguous().mT if x.dim() > 1 else with_layout(x, "strided")
    if layout == "strided":
        holder = _gaps(x, *x.shape, 3)
        holder[..., 1] = x
        return holder[..., 1]
    if layout == "offset":
        holder = _gaps(x, *x.shape[:-1], x.shape[-1] + 5)
        view = holder[..., 1 : 1 + x.shape[-1]]
        return view.copy_(x)
    if layout == "expanded":
        dim = next((d for d, n in enumerate(x.shape) if n > 1), None)
        return x if dim is None else x.narrow(dim, 0, 1).expand(x.shape)
    raise ValueError(f"layout is {layout!r}; accepted are {', '.join(LAYOUTS)}")


def _gaps(x: Tensor, *shape: int) -> Tensor:
    return x.new_full(shape, float("nan") if x.is_floating_point() else 1)
