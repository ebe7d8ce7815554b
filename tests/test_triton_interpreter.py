"""The mended interpreter: without it the tests of Triton kernels would prove nothing."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.triton
tl = pytest.importorskip("triton.language")
triton = pytest.importorskip("triton")


@triton.jit
def _arithmetic(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a * b + a)


@triton.jit
def _round_and_widen(x, narrow, wide, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i).to(narrow.dtype.element_ty)
    tl.store(narrow + i, value)
    tl.store(wide + i, value.to(tl.float32))


@triton.jit
def _matmul(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    places = i[:, None] * N + i[None, :]
    tl.store(out + places, tl.dot(tl.load(x + places), tl.load(y + places)))


@triton.jit
def _sum(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N)), 0))


@triton.jit
def _copy(x, out, first, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + first + i))


def numbers(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_bfloat16_arithmetic_is_float32s_rounded():
    x, y = numbers(2, 64)
    out = torch.empty_like(x)
    _arithmetic[(1,)](x, y, out, 64)
    assert torch.equal(out, (x * y) + x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_to_nearest_even(dtype):
    x = numbers(4096, dtype=torch.float32)
    x[:8] = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, 3e38, -1e-40, torch.inf, torch.nan])
    narrow, wide = torch.empty(4096, dtype=dtype), torch.empty(4096)
    _round_and_widen[(1,)](x, narrow, wide, 4096)
    torch.testing.assert_close(narrow, x.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(wide, x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_are_of_the_numbers_not_of_their_bits(dtype):
    x, y = numbers(2, 16, 16, dtype=dtype)
    out = torch.empty(16, 16)
    _matmul[(1,)](x, y, out, 16)
    torch.testing.assert_close(out, x.float() @ y.float())


def test_a_reduction_of_bfloat16_is_refused():
    with pytest.raises(Exception, match="reduction of bfloat16"):
        _sum[(1,)](numbers(16), torch.empty(1), 16)


@pytest.mark.parametrize(("size", "first"), [(15, 0), (16, 1), (16, -1), (0, 0)])
def test_reading_out_of_bounds_is_an_error(size, first):
    whole = torch.zeros(64)
    with pytest.raises(Exception, match="out of bounds: load of .* program"):
        _copy[(1,)](whole[20 : 20 + size], torch.empty(16), first, 16)


def test_writing_out_of_bounds_is_an_error():
    whole = torch.zeros(64)
    with pytest.raises(Exception, match="out of bounds: store of 6 of 16"):
        _copy[(1,)](torch.ones(16), whole[20:30], 0, 16)
    assert not whole.any()


def test_a_strided_view_may_be_read_to_its_end():
    whole, out = torch.arange(32.0), torch.empty(16)
    _copy[(1,)](whole[::2], out, 15, 16)
    assert torch.equal(out, whole[15:31])
