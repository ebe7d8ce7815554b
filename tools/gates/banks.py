"""Bank conflicts of shared memory, counted from the addresses that emulated threads really use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import fastattn
from fastattn._cuda import emulator

CASES: dict[str, tuple[torch.dtype, int, dict[str, Any]]] = {
    "attention, float, D=64, full": (torch.float32, 64, {}),
    "attention, __half, D=64, causal": (torch.float16, 64, {"is_causal": True}),
    "attention, float, D=128, causal": (torch.float32, 128, {"is_causal": True}),
}


def _attention(dtype: torch.dtype, dim: int, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 1, 128, dim, generator=generator).to(dtype).requires_grad_()
        for _ in range(3)
    )
    fastattn.scaled_dot_product_attention(q, k, v, **options).sum().backward()


def conflicts(case: str) -> Iterator[tuple[str, int, int]]:
    """(kernel, wavefronts, wavefronts without conflict) of each kernel that ``case`` launches."""
    with fastattn.use_backend("emulator"), emulator.counting_banks() as counts:
        _attention(*CASES[case])
    for name, uses in counts.items():
        yield name, sum(use.wavefronts for use in uses), sum(use.needed for use in uses)
