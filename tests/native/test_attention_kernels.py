"""What the tests of the ops can't see: other instruction sets, other numbers of threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fastattn import _native
from fastattn.ops.attention import _cpu
from fastattn.ops.attention.reference import AttentionConfig

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the native kernels are built on Linux only"
)

# Heads that leave threads idle, so that the backward is cut by keys and by queries; several strips
# of queries; shared key heads; a chunk of two queries; decoding steps.
SHAPES = [(1, 2, 1, 300, 700), (1, 1, 1, 1100, 260), (2, 4, 2, 65, 129), (1, 1, 1, 258, 90),
          (1, 4, 1, 1, 900), (1, 8, 1, 1, 70), (1, 1, 1, 3, 4000)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(shape) -> None:
    batch, heads, kv_heads, q_len, kv_len = shape
    draw = torch.Generator().manual_seed(0)
    query, grad = (torch.randn(batch, heads, q_len, 40, generator=draw) for _ in range(2))
    key, value = (torch.randn(batch, kv_heads, kv_len, 40, generator=draw) for _ in range(2))
    cfg = AttentionConfig(0.2, True, True, -1, -1, 0.1, False, True)
    rng_state = torch.tensor([5, 6])
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found = _cpu.fwd(query, key, value, None, None, rng_state, cfg)[:3]
            grads = _cpu.bwd(
                grad, None, None, query, key, value, None, None, rng_state, *found, cfg,
                (True, True, True, False),
            )  # fmt: skip
            results.append((*found, *grads[:3]))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, a, b in zip(("out", "lse", "low", "dq", "dk", "dv"), results[0], other,
                              strict=True):  # fmt: skip
            assert torch.equal(a, b), name


CHECK = """
import torch
from fastattn.ops.attention import _cpu, reference
from fastattn.ops.attention.reference import AttentionConfig

torch.manual_seed(0)
worst = 0.0
for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 2e-2),
                         (torch.float16, 3e-3)):
    for q_len, kv_len, dim, p in ((1, 70, 64, 0.0), (3, 700, 40, 0.2), (37, 65, 33, 0.3),
                                  (130, 130, 64, 0.1)):
        query = torch.randn(2, 4, q_len, dim).to(dtype)
        key, value = (torch.randn(2, 2, kv_len, dim).to(dtype) for _ in range(2))
        grad = torch.randn(2, 4, q_len, dim).to(dtype)
        mask = torch.randn(1, 4, q_len, kv_len)
        padding = torch.rand(2, kv_len) < 0.3
        rng_state = torch.tensor([7, 8]) if p else None
        cfg = AttentionConfig(dim**-0.5, True, True, 60, -1, p, False, True)
        needs = (True, True, True, kv_len != 130)

        def run(backend, dtype):
            cast = [x.to(dtype) for x in (query, key, value)]
            out = backend.fwd(*cast, mask.to(dtype) if dtype == torch.float64 else mask, padding,
                              rng_state, cfg)
            return out[:2] + backend.bwd(
                grad.to(dtype), None, None, *cast,
                mask.to(dtype) if dtype == torch.float64 else mask, padding, rng_state, *out[:3],
                cfg, needs)

        for got, exact in zip(run(_cpu, dtype), run(reference, torch.float64)):
            if exact is None:
                continue
            finite = exact.isfinite()
            assert torch.equal(got.isfinite(), finite)
            size = 1 + exact[finite].abs().max()
            error = (got.double() - exact)[finite].abs().max() / size
            worst = max(worst, error.item() / tolerance)
print(worst)
"""


@pytest.mark.parametrize("isa", _native.isas_built())
def test_every_instruction_set_agrees_with_the_reference(isa: str) -> None:
    env = {**os.environ, "FASTATTN_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", CHECK], env=env, capture_output=True, text=True)
    if "is not supported by this CPU" in result.stderr:
        pytest.skip(f"this CPU lacks {isa}")
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1
