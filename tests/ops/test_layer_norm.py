"""add_layer_norm: every backend against the float64 answer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fastattn
from fastattn import use_backend
from fastattn.testing import Inputs, backends, check_all, peers, philox
from fastattn.testing.pairwise import pairwise, sampled
from tests.harness import DTYPES, GRAD_LAYOUTS, judge, make_grad, named, run_on

BACKENDS = backends("add_layer_norm")
FACTORS = {
    "shape": (
        (3, 5, 16), (1,), (7,), (4, 1), (2, 63), (3, 64), (1, 65), (257, 9), (2, 3, 4, 130),
        (5, 1000), (0, 8), (2, 0, 8), (1, 1), (33, 515),
    ),
    "dtype": DTYPES,
    "residual": ("same", "none", "fp32", "bf16"),
    "parameters": ("both", "none", "weight", "bias", "fp32"),
    "dropout_p": (0.0, 0.3, 1.0),
    "outputs": (("out",), ("out", "sum"), ("sum",)),
    "layout": ("contiguous", "transposed", "strided", "offset", "expanded"),
    "grad_layout": GRAD_LAYOUTS,
    "eps": (1e-5, 1e-2),
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
@pytest.mark.parametrize(
    ("columns", "dtype", "residual"),
    [(1027, torch.float32, "same"), (4096, torch.float32, "none"), (4097, torch.float32, "same"),
     (8192, torch.float16, "fp32")],
    ids=str,
)  # fmt: skip
def test_long_rows(backend, columns, dtype, residual):
    """Longer than what a warp, or a block, of a GPU holds of a row."""
    case = {"shape": (11, columns), "dtype": dtype, "residual": residual, "dropout_p": 0.3}
    run_case({**DEFAULTS, **case, "outputs": ("out", "sum")}, backend)


def run_case(case: dict, backend: str) -> None:
    inputs, shape, dtype, p = Inputs(), case["shape"], case["dtype"], case["dropout_p"]
    kinds = {"same": dtype, "fp32": torch.float32, "bf16": torch.bfloat16}
    residual_dtype = kinds.get(case["residual"])
    x = inputs.normal(*shape, dtype=dtype, layout=case["layout"])
    residual = None
    if residual_dtype is not None:
        residual = inputs.normal(*shape, dtype=residual_dtype, layout=case["layout"])
    kind = torch.float32 if case["parameters"] == "fp32" else dtype
    weight, bias = (inputs.normal(shape[-1], dtype=kind) for _ in range(2))
    if case["parameters"] in ("none", "bias"):
        weight = None
    if case["parameters"] in ("none", "weight"):
        bias = None
    rng = inputs.rng_state()
    keep = philox.rowwise_keep(rng, p, shape) if p else None
    sum_dtype = torch.promote_types(dtype, residual_dtype or dtype)
    grads = tuple(
        make_grad(inputs, shape, sum_dtype if name == "sum" else dtype, case["grad_layout"])
        for name in case["outputs"]
    )

    def ours(*tensors: Tensor | None) -> tuple:
        found = run_on(
            backend, fastattn.add_layer_norm, *tensors, dropout_p=p, eps=case["eps"],
            return_sum="sum" in case["outputs"], rng_state=rng if p else None,
        )  # fmt: skip
        found = found if isinstance(found, tuple) else (found, None)
        found = dict(zip(("out", "sum"), found, strict=True))
        assert found["out"].dtype == dtype
        assert found["sum"] is None or found["sum"].dtype == sum_dtype
        return tuple(found[name] for name in case["outputs"])

    def plain(*tensors: Tensor | None) -> tuple:
        found = peers.add_layer_norm(*tensors, eps=case["eps"], keep=keep, dropout_p=p)
        found = dict(zip(("out", "sum"), found, strict=True))
        return tuple(found[name] for name in case["outputs"])

    tensors = (x, residual, weight, bias)
    narrow = min(
        (t.dtype for t in tensors if t is not None), key=lambda kind: torch.finfo(kind).bits
    )
    names = (*case["outputs"], "dx", "dresidual", "dweight", "dbias")
    judge(names, ours, plain, tensors, grads, sizes=sizes(tensors, grads, case, keep),
          dtypes=dict.fromkeys(names, narrow))  # fmt: skip


def sizes(tensors: tuple, grads: tuple, case: dict, keep: Tensor | None) -> dict[str, float]:
    """Terms that cancel: in the sum, and around the means that the backward takes away."""
    x, residual, weight, _ = (None if t is None else t.double() for t in tensors)
    if not x.numel():
        return {}
    total = x.abs() if residual is None else x.abs() + residual.abs()
    factor = 1 / (1 - case["dropout_p"]) if keep is not None and case["dropout_p"] < 1 else 1.0
    exact = peers.add_layer_norm(
        x, residual, eps=case["eps"], keep=keep, dropout_p=case["dropout_p"]
    )
    rstd = (exact[1].var(-1, correction=0) + case["eps"]).rsqrt().max().item()
    normal = factor * total.max().item() * rstd
    largest = max(g.double().abs().max().item() for g in grads)
    scale = 1.0 if weight is None else max(1.0, weight.abs().max().item())
    size = factor * largest * (1 + rstd * scale * max(1.0, exact[0].abs().max().item()))
    rows = x.numel() / x.shape[-1]
    return {
        "out": normal * scale,
        "sum": factor * total.max().item(),
        "dx": size,
        "dresidual": size,
        "dweight": largest * rows**0.5 * normal,
    }


@pytest.mark.parametrize("shape", [(4, 7, 16), (3, 1), (5,)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_the_reference_is_torch_in_float64(shape, affine):
    inputs = Inputs()
    x = inputs.normal(*shape, dtype=torch.float64)
    parameters = [inputs.normal(shape[-1], dtype=torch.float64) if affine else None] * 2
    grad = (inputs.normal(*shape, dtype=torch.float64),)
    right = peers.gradients(
        lambda x, w, b: (F.layer_norm(x, shape[-1:], w, b),), (x, *parameters), grad
    )
    with use_backend("reference"):
        found = peers.gradients(
            lambda x, w, b: (fastattn.add_layer_norm(x, None, w, b),), (x, *parameters), grad
        )
    names = ("out", "dx", "dweight", "dbias")
    size = {name: 10.0 for name in names}
    check_all(names, (*found[0], *found[1]), (*right[0], *right[1]), (None,) * 4, sizes=size)


@pytest.mark.parametrize("check_gradients", [gradcheck, gradgradcheck], ids=lambda f: f.__name__)
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("has_residual", [True, False])
def test_gradients_by_differences(check_gradients, p, has_residual):
    inputs = Inputs()
    x, residual = (inputs.normal(2, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    weight, bias = (inputs.normal(4, dtype=torch.float64).requires_grad_() for _ in range(2))
    rng = torch.tensor([1, 2]) if p else None

    def outputs(x, residual, weight, bias):
        return fastattn.add_layer_norm(
            x, residual if has_residual else None, weight, bias, dropout_p=p, return_sum=True,
            rng_state=rng,
        )  # fmt: skip

    if not has_residual:
        residual = None
    assert check_gradients(outputs, (x, residual, weight, bias))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("has_residual", [True, False])
def test_the_gradients_of_leaves_are_apart(backend, has_residual):
    """They are changed in place, by accumulation; on the way there x and residual may share one."""
    x, residual = (Inputs(i).normal(4, 8).requires_grad_() for i in range(2))
    given = (x, residual) if has_residual else (x,)
    out, total = run_on(backend, fastattn.add_layer_norm, *given, return_sum=True)
    loss = out.square().sum() + total.sum()
    loss.backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in given]
    assert len({leaf.grad.data_ptr() for leaf in given}) == len(given)
    loss.backward()
    assert all(torch.equal(leaf.grad, 2 * g) for leaf, g in zip(given, once, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 33, 515])
def test_a_constant_row_in_half_precision(backend, dtype, columns):
    """Its sum is rounded alike everywhere: beside the unrounded mean it would seem to vary."""
    x, residual = (torch.full((3, columns), v, dtype=dtype) for v in (1.0, 2**-10 + 2**-12))
    grad = Inputs().normal(3, columns, dtype=dtype)
    judge(
        ("out", "dx", "dresidual"),
        lambda *x: (run_on(backend, fastattn.add_layer_norm, *x),),
        lambda *x: peers.add_layer_norm(*x)[:1],
        (x, residual),
        (grad,),
        sizes={"out": 1.0, "dx": 1e-5**-0.5 * 4, "dresidual": 1e-5**-0.5 * 4},
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_sum_without_anything_to_add_is_x(backend):
    x = Inputs().normal(4, 8)
    _, total = run_on(backend, fastattn.add_layer_norm, x, return_sum=True)
    assert torch.equal(total, x)
