"""The pass rule of every numerical test:

    error(kernel, exact) <= 2 * error(peer, exact) + floor

where ``exact`` is the float64 answer, ``peer`` is plain PyTorch in the kernel's own dtype, and the
error is the largest absolute difference. Nothing is loosened per test or by the environment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Floor(NamedTuple):
    """The error allowed where the peer has none: ``epsilons`` of the dtype at the tensor's size."""

    epsilons: float
    reason: str


FLOORS = {
    torch.float64: Floor(64, "sums in another order than the peer's; exp is good to a few ulp"),
    torch.float32: Floor(16, "sums in another order than the peer's; a SIMD exp is good to 2 ulp"),
    torch.float16: Floor(1, "one rounding at the store is half an epsilon, two ways of it are one"),
    torch.bfloat16: Floor(
        1, "one rounding at the store is half an epsilon, two ways of it are one"
    ),
}

PEER_FACTOR = 2.0


def floor(dtype: torch.dtype, size: float) -> float:
    """The absolute floor for a tensor of ``dtype`` whose largest finite magnitude is ``size``."""
    return FLOORS[dtype].epsilons * torch.finfo(dtype).eps * size


def check(
    name: str,
    got: Tensor | None,
    exact: Tensor | None,
    peer: Tensor | None = None,
    *,
    size: float = 0.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Assert the pass rule for one tensor, with a message that starts with ``name``.

    Args:
        got: the kernel's answer; None only where ``exact`` is None.
        exact: the float64 answer. Infinities must stand at the same places in ``got``; NaN may not.
        peer: the same by plain PyTorch in ``got``'s dtype; without it the floor alone is allowed.
        size: the magnitude of terms that cancel in the answer, where it exceeds the answer's own.
        dtype: whose floor holds; default: ``got``'s. Give it where ``got`` was computed from inputs
            narrower than itself.
    """
    if exact is None or got is None:
        assert got is None and exact is None, f"{name}: got {_kind(got)}, expected {_kind(exact)}"
        return
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    if got.numel() == 0:
        return
    got64, exact64 = got.detach().double().cpu(), exact.detach().double().cpu()
    finite = exact64.isfinite()
    misplaced = (got64 != exact64) & ~finite | ~got64.isfinite() & finite
    assert not misplaced.any(), (
        f"{name}: {int(misplaced.sum())} of {got.numel()} not finite or wrongly so; "
        f"{_at(misplaced, got64, exact64)}"
    )
    difference = (got64 - exact64).masked_fill(~finite, 0.0).abs()
    error = difference.max().item()
    peer_error = 0.0 if peer is None else _finite_error(peer.detach().double().cpu(), exact64)
    size = max(size, exact64.masked_fill(~finite, 0.0).abs().max().item())
    allowed = PEER_FACTOR * peer_error + floor(dtype or got.dtype, size)
    assert error <= allowed, (
        f"{name}: error {error:.3g} > {allowed:.3g} allowed "
        f"({PEER_FACTOR:g} x peer's {peer_error:.3g} + floor at size {size:.3g}); "
        f"{_at(difference == difference.max(), got64, exact64)}"
    )


def check_all(
    names: tuple[str, ...],
    got: tuple[Tensor | None, ...],
    exact: tuple[Tensor | None, ...],
    peer: tuple[Tensor | None, ...],
    *,
    sizes: dict[str, float] | None = None,
    dtypes: dict[str, torch.dtype] | None = None,
) -> None:
    """``check`` for several tensors; all failures are reported together."""
    sizes, dtypes = sizes or {}, dtypes or {}
    failures = []
    for name, one, right, other in zip(names, got, exact, peer, strict=True):
        try:
            check(name, one, right, other, size=sizes.get(name, 0.0), dtype=dtypes.get(name))
        except AssertionError as failure:
            failures.append(str(failure).split("\n", 1)[0])
    assert not failures, "\n".join(failures)


def _finite_error(peer: Tensor, exact: Tensor) -> float:
    both = peer.isfinite() & exact.isfinite()
    return (peer - exact)[both].abs().max().item() if both.any() else 0.0


def _at(where: Tensor, got: Tensor, exact: Tensor) -> str:
    index = tuple(where.nonzero()[0].tolist())
    return f"at {list(index)} got {got[index].item():.6g}, exact {exact[index].item():.6g}"


def _kind(x: Tensor | None) -> str:
    return "None" if x is None else f"a tensor {tuple(x.shape)}"
