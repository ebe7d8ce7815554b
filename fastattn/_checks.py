"""The words of error messages: which argument, what was given, what is accepted."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor


def describe(x: object) -> str:
    """How a message shows an argument: a tensor as ``float32 (2, 8, 16, 64) on cpu``."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
    return f"{type(x).__name__} {x!r}"


def check_floating(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {describe(x)}; a floating-point tensor is accepted")
    if not x.is_floating_point():
        raise TypeError(f"{name} is {describe(x)}; a floating-point tensor is accepted")


def check_like(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """``x`` must have the dtype and device of ``other``."""
    check_floating(name, x)
    if x.dtype != other.dtype:
        raise TypeError(
            f"{name} is {describe(x)} but {other_name} is {describe(other)}; "
            "the same dtype is accepted"
        )
    check_device(name, x, other_name, other)


def check_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.device != other.device:
        raise ValueError(
            f"{name} is on {x.device} but {other_name} is on {other.device}; "
            "the same device is accepted"
        )


def check_probability(name: str, p: float) -> None:
    if not isinstance(p, Real) or not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} is {p!r}; a number from 0 to 1 is accepted")


def check_number(name: str, x: float, least: float = -math.inf) -> None:
    if isinstance(x, (torch.SymFloat, torch.SymInt)):
        return
    words = "a finite number" if least == -math.inf else f"a finite number of at least {least:g}"
    if not isinstance(x, Real) or isinstance(x, bool):
        raise TypeError(f"{name} is {describe(x)}; {words} is accepted")
    if not -math.inf < x < math.inf or x < least:  # torch.compile can't trace math.isfinite
        raise ValueError(f"{name} is {x!r}; {words} is accepted")


def check_bool(name: str, x: bool) -> None:
    if not isinstance(x, bool):
        raise TypeError(f"{name} is {describe(x)}; True or False is accepted")


def check_int(name: str, x: int) -> None:
    if not isinstance(x, (int, torch.SymInt)) or isinstance(x, bool):
        raise TypeError(f"{name} is {describe(x)}; an int is accepted")


def check_mask_kind(name: str, x: Tensor) -> None:
    """A mask is a tensor, boolean or floating; which floating dtype fits is checked by the op."""
    if not isinstance(x, Tensor) or not (x.dtype == torch.bool or x.is_floating_point()):
        raise TypeError(f"{name} is {describe(x)}; a bool or floating-point tensor is accepted")


def check_count(name: str, number: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{name} is {describe(number)}; an int of at least 1 is accepted")
    if number < 1:
        raise ValueError(f"{name} is {number}; an int of at least 1 is accepted")


def is_bottom_right(causal_alignment: str) -> bool:
    if causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(
            f"causal_alignment is {causal_alignment!r}; 'top_left' or 'bottom_right' is accepted"
        )
    return causal_alignment == "bottom_right"


def parse_window(window: int | tuple[int, int] | None) -> tuple[int, int]:
    """(left, right); -1 is unlimited."""
    if window is None:
        return -1, -1
    sides = (window, window) if isinstance(window, int) else window
    pair = isinstance(sides, (tuple, list)) and len(sides) == 2
    if not pair or not all(type(side) is int and side >= -1 for side in sides):
        raise ValueError(
            f"window is {window!r}; an int, or a pair (left, right), of at least -1 is accepted"
        )
    return sides[0], sides[1]


def check_rng_state(rng_state: Tensor | None, dropout_p: float, like: Tensor) -> None:
    if rng_state is None:
        if dropout_p > 0:
            raise ValueError(
                f"rng_state is None with dropout_p {dropout_p}; int64 (2,) is accepted"
            )
        return
    if not isinstance(rng_state, Tensor) or not _is_seed_and_offset(rng_state):
        raise ValueError(
            f"rng_state is {describe(rng_state)}; int64 (2,), holding seed and offset, is accepted"
        )
    check_device("rng_state", rng_state, "the input", like)


def _is_seed_and_offset(x: Tensor) -> bool:
    return str(x.dtype) == "torch.int64" and x.dim() == 1 and x.shape[0] == 2
