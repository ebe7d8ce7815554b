"""Triton kernels as machine code for GPUs that are not here: they compile, spill nothing, fit.

A few cases run in make test, all of them in make test-full; ``python -m benchmarks.triton_table``
prints what they find. In a process without TRITON_INTERPRET=1, which compiles nothing.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fastattn._triton.configs import Config
from fastattn.testing.triton_cases import ARCHS, DTYPES, HEAD_DIMS, cases, faults
from fastattn.testing.triton_offline import compile_launch, key, recorded

CASES = {case.label: case for case in cases()}
# The kernels of training, on every architecture, and each other kernel once.
QUICK = {
    *(("causal-bfloat16-64", arch) for arch in ARCHS),
    *(("causal-bfloat16-128", arch) for arch in ("sm_80", "sm_90")),
    *(("rows-bfloat16-512", arch) for arch in ("sm_80", "gfx942")),
    ("masked-bfloat16-64", "sm_90"),
}
# Kernels that may use some stack or local memory, (kernel, case, architecture), and why.
_WIDE = "products of float32 keep three parts of each factor; at most 32 bytes of them overflow"
_GROUP = "walks the query heads of a group one by one: 72 bytes a thread"
MAY_SPILL = {
    ("attention_dkdv_kernel", "causal-float32-128", "sm_80"): _WIDE,
    ("attention_dkdv_kernel", "causal-float32-128", "sm_90"): _WIDE,
    ("attention_dkdv_kernel", "decode-bfloat16-128", "sm_90"): _GROUP,
}


@pytest.mark.parametrize(
    ("label", "arch"),
    [
        pytest.param(label, arch, marks=() if (label, arch) in QUICK else pytest.mark.slow)
        for label in CASES
        for arch in ARCHS
    ],
)
def test_kernels_compile_and_pass_the_gates(label, arch):
    case = CASES[label]
    launches = case.launches(arch)
    assert launches
    for launch in launches:
        compiled = compile_launch(launch, arch)
        found = faults(compiled, case.dtype, is_low=case.is_low)
        if (compiled.name, label, arch) in MAY_SPILL:
            found = [fault for fault in found if "local memory" not in fault]
        assert not found, f"{launch.name} of {label} on {arch}: {'; '.join(found)}"


def test_every_dtype_and_head_dimension_is_among_the_cases():
    assert QUICK <= {(label, arch) for label in CASES for arch in ARCHS}
    attended = {(c.dtype, c.size) for c in CASES.values() if c.name == "causal"}
    assert attended == {(dtype, dim) for dtype in DTYPES for dim in HEAD_DIMS}


def test_a_spill_makes_the_gate_fail():
    """8192 elements a row on one warp: 256 of them a thread, who has 255 registers."""
    launch = next(
        x for x in CASES["rows-float32-8192"].launches("sm_80") if "layer_norm_bwd" in x.name
    )
    starved = launch._replace(config=launch.config._replace(num_warps=1))
    found = faults(compile_launch(starved, "sm_80"), torch.float32)
    assert any("local memory" in fault for fault in found)


def test_too_much_shared_memory_and_no_tensor_cores_make_the_gate_fail():
    from fastattn.testing.triton_offline import Compiled

    fine = Compiled("attention_fwd_kernel", "sm_80", 100, 0, 1000, 4, {"HMMA": 8})
    assert faults(fine, torch.float16) == []
    assert "shared memory" in faults(fine._replace(shared=200_000), torch.float16)[0]
    assert "no HMMA" in faults(fine._replace(tensor={}), torch.float16)[0]
    assert faults(fine._replace(tensor={}), torch.float32) == []


def test_a_training_run_of_bucketed_lengths_compiles_a_handful_of_times():
    """Batches of a translation model: lengths of 8 to 256 in steps of 8, a batch size for each."""
    from fastattn.ops.attention import _triton as attention
    from fastattn.ops.attention.reference import AttentionConfig
    from fastattn.ops.layer_norm import _triton as layer_norm

    cfg = AttentionConfig(0.125, True, False, -1, -1, 0.1, False, True)
    names: dict[str, set] = {}
    rng = torch.empty(2, dtype=torch.int64, device="meta")
    weight = torch.empty(512, device="meta")
    for length in range(8, 257, 8):
        batch = 8192 // length + (1 - 8192 // length % 2)
        x = torch.empty(batch, length, 512, dtype=torch.bfloat16, device="meta")
        q = x.view(batch, length, 8, 64).transpose(1, 2)
        padding = torch.empty(batch, length, dtype=torch.bool, device="meta")
        with recorded("sm_90") as launches:
            out, lse, low, _ = attention.fwd(q, q, q, None, padding, rng, cfg)
            inputs = q, q, q, None, padding, rng
            attention.bwd(out, None, None, *inputs, out, lse, low, cfg, (True, True, True, False))
            layer_norm.fwd(x, x, weight, weight, rng, 0.1, 1e-5, True)
        for launch in launches:
            names.setdefault(launch.name, set()).add(key(launch))
    assert len(names) == 5
    assert {name: len(keys) for name, keys in names.items() if len(keys) > 3} == {}


def test_a_configuration_is_a_pure_function():
    from fastattn._triton import configs

    assert configs.rows(512, "sm_90") == configs.rows(512, "sm_90")
    assert configs.rows(512, "sm_90").config == Config(2, 512, 4)
