from __future__ import annotations

import os

import pytest
import torch

import fastattn

CPU_BACKENDS = ("reference", "auto")  # each has to run every call of a module on a CPU
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"

# Minutes of interpreting that make test-full spends: fifty backwards, thousands of blocks.
SLOW_IF_INTERPRETED = ("flash_attention_359", "25593", "liger_950", "apex_411")
collect_ignore = ["test_triton_offline.py"] if INTERPRETS else []  # it compiles kernels

if INTERPRETS:
    from fastattn.testing import triton_interpreter

    triton_interpreter.mend()


@pytest.fixture(params=CPU_BACKENDS)
def backend(request):
    """The test runs once on each backend; "auto" is what a user gets."""
    with fastattn.use_backend(request.param):
        yield request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """What runs on the triton backend is marked so, and runs under the interpreter alone.

    Its kernels take no float64; that they say so is a test of its own.
    """
    kept, dropped = [], []
    for item in items:
        parameters = getattr(item, "callspec", None)
        parameters = {} if parameters is None else parameters.params
        if parameters.get("backend") == "triton":
            item.add_marker(pytest.mark.triton)
            if any(name in item.name for name in SLOW_IF_INTERPRETED):
                item.add_marker(pytest.mark.slow)
        is_triton = item.get_closest_marker("triton") is not None
        ran = not is_triton or INTERPRETS and not _is_beyond_triton(item, parameters)
        (kept if ran else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def _is_beyond_triton(item, parameters) -> bool:
    """float64, which gradients by differences need; 65,536 blocks, hours under the interpreter."""
    case = parameters.get("case")
    values = [*parameters.values(), *(case.values() if isinstance(case, dict) else ())]
    named = ("by_differences", "65536_batches")
    return any(v is torch.float64 for v in values) or any(n in item.name for n in named)
