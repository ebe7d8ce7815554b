"""softmax: every backend against the float64 answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fastattn
from fastattn import use_backend
from fastattn.testing import Inputs, backends, check, check_all, peers, with_layout
from fastattn.testing.pairwise import pairwise, sampled
from tests.harness import DTYPES, GRAD_LAYOUTS, judge, make_grad, named, run_on

BACKENDS = backends("softmax")
NEG = float("-inf")
MASKS = (
    "none", "bool", "bool-broadcast", "bool-last", "bool-dead-rows", "bool-sliced", "float",
    "float-fp32", "float-broadcast", "float-inf", "float-min",
)  # fmt: skip
FACTORS = {
    "shape": (
        (2, 3, 5, 7), (1, 1), (4, 16), (3, 63), (2, 64), (65, 65), (17, 130), (3, 1), (1, 1000),
        (0, 4), (4, 0), (2, 0, 5), (2, 2, 2, 2, 3, 9),
    ),
    "mask": MASKS,
    "is_causal": (False, True),
    "dtype": DTYPES,
    "scale": (1.0, 0.3, -2.0, 0.0),
    "layout": ("contiguous", "transposed", "strided", "offset", "expanded"),
    "grad_layout": GRAD_LAYOUTS,
}  # fmt: skip
DEFAULTS = {name: values[0] for name, values in FACTORS.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", named(pairwise(FACTORS), DEFAULTS))
def test_matrix(case, backend):
    run_case(case, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", named(sampled(FACTORS, 1500), DEFAULTS))
def test_more_of_the_matrix(case, backend):
    run_case(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "one-column"])
@pytest.mark.parametrize("is_bool", [True, False])
def test_masks_in_any_memory(backend, layout, is_bool):
    inputs = Inputs()
    x, mask = inputs.normal(3, 2, 5, 9), inputs.normal(2, 5, 9)
    mask = mask[..., :1] if layout == "one-column" else with_layout(mask, layout)
    if layout == "expanded":
        mask = mask[..., :1].expand(3, 2, 5, 9)
    if is_bool:
        mask = mask > 0
    right = peers.softmax(x.double(), mask if is_bool else mask.double(), False, 1.0)
    check("out", run_on(backend, fastattn.softmax, x, mask=mask), right)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["none", "bool-dead-rows", "float-inf"])
@pytest.mark.parametrize("columns", [1027, 4096, 4099])
def test_long_rows(backend, mask, columns):
    """Longer than what a warp, or a block, of a GPU holds of a row."""
    run_case({**DEFAULTS, "shape": (5, columns), "mask": mask, "scale": 0.3}, backend)


def run_case(case: dict, backend: str) -> None:
    inputs, shape, dtype = Inputs(), case["shape"], case["dtype"]
    x = inputs.normal(*shape, dtype=dtype, layout=case["layout"])
    mask = make_mask(case["mask"], shape, dtype, inputs)
    causal, scale = case["is_causal"], case["scale"]
    grads = (make_grad(inputs, shape, dtype, case["grad_layout"]),)

    def ours(x: Tensor, mask: Tensor | None) -> tuple:
        out = run_on(backend, fastattn.softmax, x, mask=mask, is_causal=causal, scale=scale)
        assert out.is_contiguous() and out.dtype == dtype
        return (out,)

    def plain(x: Tensor, mask: Tensor | None) -> tuple:
        return (peers.softmax(x, mask, causal, scale),)

    narrow = dtype if mask is None or mask.dtype == torch.bool else min(
        dtype, mask.dtype, key=lambda kind: kind.itemsize
    )  # fmt: skip
    size = grads[0].double().abs().max().item() if x.numel() else 0.0
    judge(("out", "dx", "dmask"), ours, plain, (x, mask), grads,
          sizes={"dx": abs(scale) * size, "dmask": size * len(shape) ** 2},
          dtypes={"dmask": narrow})  # fmt: skip


def make_mask(kind: str, shape: tuple, dtype: torch.dtype, inputs: Inputs) -> Tensor | None:
    if kind == "none":
        return None
    wide = (1,) * (len(shape) - 1) + shape[-1:]
    if kind.startswith("bool"):
        size = {"bool-broadcast": (*wide[:-2], *shape[-2:]), "bool-last": shape[-1:]}
        mask = inputs.bools(*size.get(kind, shape), true=0.6)
        if kind == "bool-dead-rows":
            mask[..., ::3, :] = False
        return with_layout(mask, "offset") if kind == "bool-sliced" else mask
    mask = inputs.normal(*(wide if kind == "float-broadcast" else shape), dtype=dtype)
    if kind == "float-fp32":
        return mask.float()
    if kind in ("float-inf", "float-min"):
        low = NEG if kind == "float-inf" else torch.finfo(dtype).min
        mask[..., : shape[-1] // 2] = low
        mask[..., ::3, :] = low
    return mask


@pytest.mark.parametrize("shape", [(4, 7), (2, 3, 5, 9), (1,), (6,)], ids=str)
def test_the_reference_is_torch_in_float64(shape):
    inputs = Inputs()
    x, grad = (inputs.normal(*shape, dtype=torch.float64) for _ in range(2))
    right = peers.gradients(lambda x: (torch.softmax(x, -1),), (x,), (grad,))
    with use_backend("reference"):
        found = peers.gradients(lambda x: (fastattn.softmax(x),), (x,), (grad,))
    check_all(("out", "dx"), (*found[0], *found[1]), (*right[0], *right[1]), (None, None),
              sizes={"dx": 1.0})  # fmt: skip


@pytest.mark.parametrize("check_gradients", [gradcheck, gradgradcheck], ids=lambda f: f.__name__)
@pytest.mark.parametrize("mask_shape", [None, (2, 3, 4), (1, 3, 1), (4,)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_by_differences(check_gradients, mask_shape, is_causal):
    inputs = Inputs()
    x = inputs.normal(2, 3, 4, dtype=torch.float64).requires_grad_()
    mask = None
    if mask_shape is not None:
        mask = inputs.normal(*mask_shape, dtype=torch.float64).requires_grad_()
    assert check_gradients(
        lambda x, mask: fastattn.softmax(x, mask=mask, is_causal=is_causal, scale=0.7), (x, mask)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0.0, 30000.0, -30000.0])
def test_scores_of_any_size_give_shares_of_one(backend, dtype, shift):
    x = Inputs().integers(-3, 4, 5, 37).to(dtype) + torch.tensor(shift, dtype=dtype)
    out = run_on(backend, fastattn.softmax, x)
    right = torch.softmax(x.double(), -1)
    torch.testing.assert_close(out.double(), right, rtol=4 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_minus_infinity_are_zero_and_finfo_min_uniform(backend):
    x = torch.zeros(4, 6)
    x[1], x[2] = NEG, torch.finfo(torch.float32).min
    x.requires_grad_()
    out = run_on(backend, fastattn.softmax, x)
    assert not out[1].any()
    torch.testing.assert_close(out[2], torch.full((6,), 1 / 6))
    (grad,) = torch.autograd.grad(out[:, 0].sum(), x)
    assert grad.isfinite().all() and not grad[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fill", [NEG, float("nan"), float("inf")])
def test_what_a_bool_mask_hides_does_not_count(backend, fill):
    x, mask = Inputs().normal(5, 9), Inputs(1).bools(5, 9)
    clean = run_on(backend, fastattn.softmax, x, mask=mask)
    dirty = run_on(backend, fastattn.softmax, x.masked_fill(~mask, fill), mask=mask)
    assert torch.equal(clean, dirty)
