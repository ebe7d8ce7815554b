"""scaled_dot_product_attention: the pairwise matrix, and what a matrix of random numbers misses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import fastattn
from fastattn import use_backend
from fastattn.testing import Inputs, backends, check, check_all, peers
from fastattn.testing.pairwise import pairwise, sampled
from tests.harness import judge, named, run_on
from tests.ops import attention_cases as matrix
from tests.ops.attention_cases import compare

BACKENDS = backends("attention")
attention = fastattn.scaled_dot_product_attention


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "emulator"])
@pytest.mark.parametrize("case", named(pairwise(matrix.FACTORS), matrix.DEFAULTS))
def test_matrix(case, backend):
    matrix.run_case(case, backend)


@pytest.mark.parametrize("case", named(pairwise(matrix.EMULATED), matrix.DEFAULTS))
def test_matrix_of_cuda_kernels(case):
    matrix.run_case(case, "emulator")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", named(sampled(matrix.FACTORS, 3000), matrix.DEFAULTS))
def test_more_of_the_matrix(case, backend):
    matrix.run_case(case, backend)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}, {"mask": "bool"},
     {"mask": "float"}],
    ids=str,
)  # fmt: skip
def test_the_reference_is_torch_in_float64(options):
    options, inputs = dict(options), Inputs()
    kv_heads = 2 if "enable_gqa" in options else 4
    query = inputs.normal(2, 4, 7, 8, dtype=torch.float64)
    key, value = (inputs.normal(2, kv_heads, 9, 8, dtype=torch.float64) for _ in range(2))
    mask = None
    if options.pop("mask", None) == "bool":
        mask = inputs.bools(2, 1, 7, 9) | (torch.arange(9) == 0)
    elif "mask" in options:
        mask = inputs.normal(2, 1, 7, 9, dtype=torch.float64)
    grad = (inputs.normal(2, 4, 7, 8, dtype=torch.float64),)
    tensors = (query, key, value, mask)
    right = peers.gradients(
        lambda *x: (F.scaled_dot_product_attention(*x, **options),), tensors, grad
    )
    with use_backend("reference"):
        found = peers.gradients(lambda *x: (attention(*x, **options),), tensors, grad)
    check_all(("output", "dq", "dk", "dv", "dmask"), (*found[0], *found[1]), (*right[0], *right[1]),
              (None,) * 5)  # fmt: skip


GRADCHECKS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"window": (1, 2)},
    "padding": {"key_padding_mask": torch.tensor([[0, 1, 0, 0], [1, 1, 1, 1]]).bool()},
    "dropout": {"dropout_p": 0.4},
    "dead-rows": {"attn_mask": torch.tensor([[0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0]]).bool()},
}


@pytest.mark.parametrize("options", GRADCHECKS.values(), ids=GRADCHECKS)
@pytest.mark.parametrize("check_gradients", [gradcheck, gradgradcheck], ids=lambda f: f.__name__)
def test_gradients_of_every_output_by_differences(options, check_gradients):
    query, key, value = leaves((2, 2, 3, 2), (2, 1, 4, 2), (2, 1, 4, 3))
    rng = torch.tensor([5, 6]) if "dropout_p" in options else None

    def outputs(query, key, value):
        found = attention(query, key, value, enable_gqa=True, return_lse=True,
                          return_weights=True, rng_state=rng, **options)  # fmt: skip
        return found.output, found.lse.clamp(min=-1e3), found.weights

    assert check_gradients(outputs, (query, key, value))


@pytest.mark.parametrize("shape", [(2, 2, 3, 4), (1, 2, 3, 4), (2, 1, 1, 4), (3, 1), (1,)], ids=str)
@pytest.mark.parametrize("check_gradients", [gradcheck, gradgradcheck], ids=lambda f: f.__name__)
def test_gradients_of_a_mask_by_differences(shape, check_gradients):
    query, key, value, mask = leaves((2, 2, 3, 2), (2, 2, 4, 2), (2, 2, 4, 2), shape)
    assert check_gradients(
        lambda q, mask: attention(q, key, value, mask, is_causal=True), (query, mask)
    )


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_gradients_of_a_floating_padding_mask_by_differences(mask):
    query, key, value, padding = leaves((2, 2, 3, 2), (2, 2, 4, 2), (2, 2, 4, 2), (2, 4))
    mask = {
        None: None,
        "bool": torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool(),
        "float": Inputs(2).normal(3, 4, dtype=torch.float64),
    }[mask]
    assert gradcheck(
        lambda q, padding: attention(q, key, value, mask, key_padding_mask=padding),
        (query, padding),
    )


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    inputs = Inputs(1)
    return [inputs.normal(*s, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("base", [2.0**23, 1e7, -1e7, 2.0**60, -(2.0**100)])
def test_large_scores_leave_the_gradients_right(backend, base):
    """Scores base + n, exact in float32: one float32 log-sum-exp would have no bits for the log."""
    steps = torch.tensor([0.0, 1, 1, 2, 0, 3, 2]) if abs(base) < 2**24 else torch.zeros(7)
    query = torch.tensor([[base, 1.0]]).expand(1, 2, 3, 2)
    key = torch.stack([torch.ones(7), steps], -1).expand(1, 2, 7, 2)
    compare(backend, query, key, Inputs().normal(1, 2, 7, 4), scale=1.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_row_of_finfo_min_is_uniform(backend, dtype):
    inputs = Inputs()
    query, key, value = (inputs.normal(1, 2, n, 8, dtype=dtype) for n in (5, 9, 9))
    mask = torch.zeros(5, 9, dtype=dtype)
    mask[1], mask[2, 3:] = torch.finfo(dtype).min, torch.finfo(dtype).min
    out, _ = compare(backend, query, key, value, mask)
    exact = value.double().mean(2)
    check("row 1", out[:, :, 1], exact, exact.to(dtype))
    judge(  # and with a mask that needs no gradient, which opens other ways
        ("output", "dq", "dk", "dv"),
        lambda *x: (run_on(backend, attention, *x, mask),),
        lambda *x: peers.attention(*x, mask)[:1],
        (query, key, value),
        (inputs.normal(1, 2, 5, 8, dtype=dtype),),
        sizes=dict.fromkeys(("dq", "dk", "dv"), 10.0),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": 3}], ids=str)
def test_padded_keys_never_leak(backend, bad, options):
    inputs = Inputs()
    query, key, value = (inputs.normal(3, 2, n, 8) for n in (6, 10, 10))
    padding = inputs.bools(3, 10, true=0.4)
    padding[0], padding[1] = True, torch.arange(10) >= 7
    clean = compare(backend, query, key, value, key_padding_mask=padding, **options)
    hidden = padding[:, None, :, None]
    key, value = key.masked_fill(hidden, bad), value.masked_fill(hidden, bad)
    dirty = compare(backend, query, key, value, key_padding_mask=padding, **options)
    assert torch.equal(dirty[0], clean[0])
    assert all(map(torch.equal, dirty[1][:3], clean[1][:3]))
    assert not dirty[0][0].any() and not dirty[1][0][0].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_sum_exp_is_natural_and_minus_infinity_without_keys(backend):
    query, key = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 5, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]).bool()
    out = run_on(backend, attention, query, key, key, mask, return_lse=True)
    assert out.weights is None and out.lse.is_contiguous()
    right = torch.tensor([[[5.0, 0.0, 1.0]]]).log()
    torch.testing.assert_close(out.lse, right)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("q", "kv", "mask"),
    [((5, 8), (7, 8), (5, 7)), ((3, 5, 8), (3, 7, 8), (3, 5, 7)), ((3, 5, 8), (1, 7, 8), (5, 7)),
     ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (3, 1, 5, 7)), ((1, 4, 5, 8), (6, 4, 7, 8), (4, 5, 7)),
     ((2, 3, 4, 5, 8), (4, 7, 8), (2, 1, 1, 1, 7))],
    ids=str,
)  # fmt: skip
def test_leading_dimensions_broadcast_as_torch(backend, q, kv, mask):
    inputs = Inputs()
    query, key, value = inputs.normal(*q), inputs.normal(*kv), inputs.normal(*kv)
    for one in (inputs.bools(*mask) | (torch.arange(7) == 3), inputs.normal(*mask)):
        right = F.scaled_dot_product_attention(query, key, value, one)
        out = run_on(backend, attention, query, key, value, one)
        torch.testing.assert_close(out, right)
    whole = run_on("reference", attention, query, key, value, return_lse=True, return_weights=True)
    assert whole.output.shape == right.shape and whole.lse.shape == right.shape[:-1]
    assert whole.weights.shape == (*right.shape[:-1], 7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "q, k, v",
    [
        ((2, 1, 3, 4), (2, 5, 7, 4), (2, 5, 7, 6)),
        ((2, 5, 3, 4), (2, 1, 7, 4), (2, 5, 7, 6)),
        ((2, 5, 3, 4), (2, 5, 7, 4), (1, 7, 6)),
        ((3, 4), (2, 5, 7, 4), (2, 5, 7, 6)),
        ((2, 1, 3, 4), (7, 4), (5, 7, 6)),
    ],
)
def test_heads_broadcast_as_torch(backend, q, k, v):
    inputs = Inputs()
    given = [inputs.normal(*shape).requires_grad_() for shape in (q, k, v)]
    expected = F.scaled_dot_product_attention(*given)
    found = run_on(backend, attention, *given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), given), torch.autograd.grad(expected.sum(), given)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_results_lie_with_heads_last(backend, dtype):
    """Output and gradients are [B, L, H, D] in memory, so that merging the heads copies nothing."""
    query, key, value = (Inputs(i).normal(2, 3, 5 + i, 8, dtype=dtype) for i in (0, 1, 1))
    out, grads = compare(backend, query, key, value)
    for x in (out, *grads[:3]):
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", range(4))
def test_one_gradient_alone_is_the_same(backend, wanted):
    inputs = Inputs()
    tensors = [inputs.normal(2, 2, 6, 8) for _ in range(3)] + [inputs.normal(1, 2, 6, 6)]
    _, all_grads = compare(backend, *tensors, is_causal=True)
    tensors[wanted].requires_grad_()
    out = run_on(backend, attention, *tensors, is_causal=True)
    (grad,) = torch.autograd.grad(out, tensors[wanted], torch.ones(()).expand_as(out))
    torch.testing.assert_close(grad, all_grads[wanted], rtol=1e-5, atol=1e-6)
