"""varlen_attention: every backend against the float64 answer, sequence by sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fastattn
from fastattn.testing import Inputs, backends, peers, philox
from fastattn.testing.pairwise import pairwise, sampled
from tests.harness import DTYPES, GRAD_LAYOUTS, judge, make_grad, named, offsets, run_on
from tests.ops.attention_cases import PATTERNS

BACKENDS = backends("varlen_attention")
LENGTHS = {
    "same": ((5, 5), (5, 5)),
    "ragged": ((3, 0, 65, 1), (4, 7, 63, 0)),
    "one": ((64,), (65,)),
    "ones": ((1, 1, 1, 1, 1), (1, 1, 1, 1, 1)),
    "decode": ((1, 1, 1), (130, 2, 67)),
    "empty": ((0, 0), (0, 0)),
    "no-keys": ((4, 3), (0, 0)),
    "no-queries": ((0, 0), (4, 3)),
    "no-sequences": ((), ()),
}
FACTORS = {
    "lengths": tuple(LENGTHS),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "dims": ((8, 8), (24, 40), (1, 1), (129, 20), (64, 64)),
    "pattern": tuple(PATTERNS),
    "dtype": DTYPES,
    "outputs": (("output",), ("output", "lse"), ("lse",)),
    "dropout_p": (0.0, 0.3),
    "layout": ("contiguous", "transposed", "strided", "offset", "expanded"),
    "grad_layout": GRAD_LAYOUTS,
    "scale": (None, 0.7),
}
DEFAULTS = {name: values[0] for name, values in FACTORS.items()}

# For CUDA kernels on emulated threads: fewer pairs, for each costs the building of kernels.
EMULATED = {
    **FACTORS,
    "dims": ((8, 8), (24, 40), (64, 64)),
    "pattern": ("full", "causal-right", "window", "window-past"),
    "dtype": (torch.float32, torch.float16),
    "layout": ("contiguous", "transposed", "strided"),
}


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "emulator"])
@pytest.mark.parametrize("case", named(pairwise(FACTORS), DEFAULTS))
def test_matrix(case, backend):
    run_case(case, backend)


@pytest.mark.parametrize("case", named(pairwise(EMULATED), DEFAULTS))
def test_matrix_of_cuda_kernels(case):
    run_case(case, "emulator")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", named(sampled(FACTORS, 1000), DEFAULTS))
def test_more_of_the_matrix(case, backend):
    run_case(case, backend)


def run_case(case: dict, backend: str) -> None:
    q_lens, k_lens = LENGTHS[case["lengths"]]
    (heads, kv_heads), (dk, dv), dtype = case["heads"], case["dims"], case["dtype"]
    inputs, p, outputs = Inputs(), case["dropout_p"], case["outputs"]
    sizes = (sum(q_lens), heads, dk), (sum(k_lens), kv_heads, dk), (sum(k_lens), kv_heads, dv)
    tensors = tuple(inputs.normal(*s, dtype=dtype, layout=case["layout"]) for s in sizes)
    ends = offsets(q_lens), offsets(k_lens)
    rng = inputs.rng_state()
    wide = torch.promote_types(dtype, torch.float32)
    shapes = {"output": (sum(q_lens), heads, dv), "lse": (heads, sum(q_lens))}
    grads = tuple(
        make_grad(inputs, shapes[name], wide if name == "lse" else dtype, case["grad_layout"])
        for name in outputs
    )
    options = {
        "causal_alignment": "top_left", **PATTERNS[case["pattern"]], "scale": case["scale"],
    }  # fmt: skip
    keeps = [
        philox.attention_keep(rng, p, (1, heads, *lens), first_head=b * heads)
        for b, lens in enumerate(zip(q_lens, k_lens, strict=True))
    ]

    def ours(*tensors: Tensor) -> tuple:
        found = run_on(
            backend, fastattn.varlen_attention, *tensors, *ends, enable_gqa=True, dropout_p=p,
            rng_state=rng if p else None, return_lse="lse" in outputs, **options,
        )  # fmt: skip
        if not isinstance(found, tuple):
            return (found,)
        assert found.lse.dtype == wide and found.weights is None
        return tuple(getattr(found, name) for name in outputs)

    def plain(*tensors: Tensor) -> tuple:
        found = peers.varlen_attention(
            *tensors, *ends, keeps=keeps if p else None, dropout_p=p, **options
        )
        return tuple(x for x, name in zip(found, ("output", "lse"), strict=True) if name in outputs)

    key_size = max((x.abs().max().item() for x in tensors if x.numel()), default=0.0)
    size = (1 if case["scale"] is None else dk**0.5) * key_size**2 * 4
    judge((*outputs, "dq", "dk", "dv"), ours, plain, tensors, grads,
          sizes={"dq": size, "dk": size})  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (4, 0)}], ids=str)
def test_equals_attention_of_the_padded_batch(backend, dtype, options):
    """Packed and padded are two ways to say the same; the queries' padding is cut away."""
    lens, heads, dim = (7, 12, 1), 2, 16
    inputs = Inputs()
    padded = [inputs.normal(3, heads, 12, dim, dtype=dtype) for _ in range(3)]
    real = torch.arange(12) < torch.tensor(lens)[:, None]
    packed = [x.transpose(1, 2)[real] for x in padded]
    ends = offsets(lens)
    out = run_on(backend, fastattn.varlen_attention, *packed, ends, ends, return_lse=True,
                 causal_alignment="top_left", **options)  # fmt: skip
    right = run_on(backend, fastattn.scaled_dot_product_attention, *padded,
                   key_padding_mask=~real, return_lse=True, **options)  # fmt: skip
    torch.testing.assert_close(out.output, right.output.transpose(1, 2)[real])
    torch.testing.assert_close(out.lse, right.lse.transpose(0, 1)[:, real])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_alignment_is_bottom_right(backend):
    query, key = torch.zeros(2, 1, 4), torch.zeros(5, 1, 4)
    value = torch.eye(5).unsqueeze(1)
    ends = offsets((2,)), offsets((5,))
    out = run_on(backend, fastattn.varlen_attention, query, key, value, *ends, is_causal=True)
    seen = (out[:, 0] != 0).int().tolist()
    assert seen == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_longer_bounds_than_needed_change_nothing(backend):
    x, ends = Inputs().normal(9, 2, 8), offsets((4, 5))
    tight, loose = (
        run_on(backend, fastattn.varlen_attention, x, x, x, ends, ends, max_seqlen_q=n,
               max_seqlen_k=n)
        for n in (5, 1000)
    )  # fmt: skip
    assert torch.equal(tight, loose)


@pytest.mark.parametrize("check_gradients", [gradcheck, gradgradcheck], ids=lambda f: f.__name__)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradients_by_differences(check_gradients, p):
    inputs = Inputs()
    query, key, value = (
        inputs.normal(5, h, d, dtype=torch.float64).requires_grad_()
        for h, d in ((2, 2), (1, 2), (1, 3))
    )
    ends = offsets((2, 0, 3)), offsets((1, 1, 3))

    def outputs(*tensors):
        found = fastattn.varlen_attention(
            *tensors, *ends, is_causal=True, dropout_p=p, enable_gqa=True, return_lse=True,
            rng_state=torch.tensor([1, 2]) if p else None,
        )  # fmt: skip
        return found.output, found.lse.clamp(min=-1e3)

    assert check_gradients(outputs, (query, key, value))
