"""Triton's interpreter, mended: what it computes wrongly and misses, put right for tests on CPUs.

    bfloat16    NumPy has none, so the interpreter keeps its bits in uint16 and, in products and
                sums, calculates with those as if they were integers. Here every operation on
                bfloat16 goes through float32, and is rounded once to nearest even.
    bounds      An address outside of every tensor of the launch reads or breaks foreign memory.
                Here it is an ``IndexError`` that says how many elements, and of which program.
    time        The language is patched anew at every call of a device function. Here once.

``mend()`` has to be called before the first launch, with TRITON_INTERPRET=1 set before triton was
imported. Written for triton 3.3 to 3.9; tests/test_triton_interpreter.py says whether it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle


@functools.cache
def mend() -> None:
    """Mend the interpreter of this process; once is enough."""
    assert interpreter_is_on(), "TRITON_INTERPRET=1 has to be set before triton is imported"
    _mend_bfloat16()
    _mend_bounds()
    _mend_patching()


def interpreter_is_on() -> bool:
    return isinstance(_probe, interpreter.InterpretedFunction)


@triton.jit
def _probe():
    pass


def to_float32(bits: np.ndarray) -> np.ndarray:
    """float32 of the same value for the bits of bfloat16, in uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of bfloat16, rounded to nearest even, in uint16."""
    wide = np.ascontiguousarray(values, np.float32)
    bits = wide.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded).reshape(np.shape(values))


def _is_bfloat16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widened(handle: Any) -> Any:
    return _Handle(to_float32(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _narrowed(values: np.ndarray) -> Any:
    if values.dtype == np.bool_:
        return _Handle(values, tl.int1)
    return _Handle(to_bfloat16(values), tl.bfloat16)


def _mend_bfloat16() -> None:
    cast, binary, unary = _Builder.cast_impl, _Builder.binary_op, _Builder.unary_op
    fp_to_fp, dot = _Builder.create_fp_to_fp, _Builder.create_dot
    reduce, fma = interpreter.ReduceOps.apply_impl, _Builder.create_fma

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if _is_bfloat16(src) and dst_type.scalar == tl.bfloat16:
            return src
        if dst_type.scalar == tl.bfloat16:
            return _narrowed(src.data.astype(np.float32))
        return cast(self, _widened(src), dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return cast_impl(self, src, dst_type)
        return fp_to_fp(self, src, dst_type, rounding)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable) -> Any:
        if not _is_bfloat16(lhs):
            return binary(self, lhs, rhs, op)
        return _narrowed(op(to_float32(lhs.data), to_float32(rhs.data)))

    def unary_op(self: Any, arg: Any, op: Callable) -> Any:
        if not _is_bfloat16(arg):
            return unary(self, arg, op)
        return _narrowed(op(to_float32(arg.data)))

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), d, *rest)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if _is_bfloat16(z):
            raise NotImplementedError("fma of bfloat16: cast to float32 first")
        return fma(self, x, y, z)

    def apply_impl(self: Any, inputs: Any) -> Any:
        if any(_is_bfloat16(x.handle) for x in inputs):
            raise NotImplementedError("a reduction of bfloat16: cast to float32 first")
        return reduce(self, inputs)

    _Builder.cast_impl, _Builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    _Builder.binary_op, _Builder.unary_op = binary_op, unary_op
    _Builder.create_dot, _Builder.create_fma = create_dot, create_fma
    interpreter.ReduceOps.apply_impl = apply_impl


_memory: list[tuple[int, int]] = []  # first and last byte but one of the running launch's tensors


def _mend_bounds() -> None:
    prepare = interpreter.GridExecutor._init_args_hst
    load, store = _Builder.create_masked_load, _Builder.create_masked_store

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        _memory[:] = [_extent(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        return prepare(self, args, kwargs)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        _check_bounds("load", ptrs, mask)
        return load(self, ptrs, mask, *rest, **options)

    def create_masked_store(
        self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any
    ) -> Any:
        _check_bounds("store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest, **options)

    interpreter.GridExecutor._init_args_hst = init_args
    _Builder.create_masked_load = create_masked_load
    _Builder.create_masked_store = create_masked_store


def _extent(x: Tensor) -> tuple[int, int]:
    if x.numel() == 0:
        return x.data_ptr(), x.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _check_bounds(kind: str, ptrs: Any, mask: Any) -> None:
    addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
    if addresses.size == 0:
        return
    size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    low, high = int(addresses.min()), int(addresses.max()) + size
    if any(start <= low and high <= end for start, end in _memory):
        return
    inside = np.zeros(addresses.shape, dtype=bool)
    for start, end in _memory:
        if end - start >= size:
            inside |= (addresses >= np.uint64(start)) & (addresses <= np.uint64(end - size))
    if not inside.all():
        raise IndexError(
            f"out of bounds: {kind} of {np.count_nonzero(~inside)} of {addresses.size} elements, "
            f"program {interpreter.interpreter_builder.grid_idx}"
        )


class _Kept:
    """What stays patched has nothing to restore."""

    def restore(self) -> None:
        pass


def _mend_patching() -> None:
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> _Kept:
        languages = frozenset(
            id(x) for x in function.__globals__.values() if x is tl or x is tl.core
        )
        if languages not in patched:
            patched.add(languages)
            patch(function)
            # triton 3.3 calls int() on an array, which NumPy 2.4 refuses
            tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
        return _Kept()

    interpreter._patch_lang = patch_once
