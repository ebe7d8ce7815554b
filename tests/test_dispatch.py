"""Which backend runs: the order, use_backend, FASTATTN_BACKEND, explain, the backward's memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

import fastattn
from fastattn import BackendError, _dispatch, explain, use_backend

X = torch.zeros(2, 3)


@pytest.fixture
def recorded(monkeypatch):
    """What the backends of an op "toy" were asked to do; its "cpu" declines negative numbers."""
    calls = []

    def backend(name):
        def why_not(x):
            return "a negative number" if name == "cpu" and x < 0 else None

        def fwd(x):
            calls.append((name, "fwd", x))

        return SimpleNamespace(name=name, why_not=why_not, fwd=fwd)

    toy = {name: backend(name) for name in ("cpu", "torch", "reference", "triton")}
    monkeypatch.setitem(_dispatch._ops, "toy", toy)
    return calls


def select(x, device="cpu"):
    return _dispatch.select("toy", torch.device(device), _dispatch.requested(), x).name


def test_the_first_backend_of_the_device_that_can_runs(recorded):
    assert select(1) == "cpu"
    assert select(-1) == "torch"
    assert select(1, "meta") == "torch"


def test_a_gpu_that_falls_back_to_the_reference_says_why_once(recorded, monkeypatch):
    monkeypatch.setattr(_dispatch, "_is_ampere", lambda device: True)
    monkeypatch.setattr(_dispatch, "_warned", set())
    for name in ("triton", "torch"):
        monkeypatch.setattr(_dispatch._ops["toy"][name], "why_not", lambda x: "an odd number")
    with pytest.warns(UserWarning, match=r"toy on cuda:0 runs as plain PyTorch.*triton: an odd"):
        assert select(1, "cuda:0") == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(1, "cuda:0") == "reference"
        with use_backend("reference"):
            assert select(1, "cuda:0") == "reference"


@pytest.mark.parametrize("name", ["cpu", "torch", "reference", "triton"])
def test_use_backend_forces(recorded, name):
    with use_backend(name):
        assert select(1) == name
    assert select(1) == "cpu"


def test_use_backend_nests_and_ends_with_an_exception(recorded):
    with use_backend("reference"):
        with use_backend("torch"):
            assert select(1) == "torch"
        assert select(1) == "reference"
        with use_backend("auto"):
            assert select(1) == "cpu"
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert select(1) == "cpu"


def test_use_backend_holds_in_its_own_thread_alone(recorded):
    seen = []
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(select(1)))
        thread.start()
        thread.join()
    assert seen == ["cpu"]


def test_a_forced_backend_that_cannot_run_says_why(recorded):
    with use_backend("cpu"), pytest.raises(BackendError, match="toy.*'cpu'.*a negative number"):
        select(-1)


def test_a_backend_that_the_op_has_not_is_an_error_that_lists_those_it_has(recorded):
    with use_backend("cuda"), pytest.raises(BackendError, match="cpu, torch, reference, triton"):
        select(1)


def test_no_backend_at_all_says_every_reason(recorded, monkeypatch):
    monkeypatch.setitem(_dispatch._ops, "toy", {"cpu": _dispatch._ops["toy"]["cpu"]})
    with pytest.raises(BackendError, match="no backend can run.*cpu: a negative number"):
        select(-1)


@pytest.mark.parametrize("name", ["", "gpu", "CPU", None])
def test_unknown_names_are_errors_that_list_the_known(name):
    known = "auto, cpu, cuda, triton, torch, reference, emulator"
    with pytest.raises(ValueError, match=f"{name!r}; accepted are {known}"), use_backend(name):
        pass


def test_an_empty_environment_asks_for_nothing():
    code = "import fastattn._dispatch as d; print(d.requested())"
    assert run_python(code, "").stdout.strip() == "auto"


def test_the_environment_asks_for_a_backend_and_a_with_block_overrules_it():
    code = (
        "import torch, fastattn\n"
        "print(fastattn.explain(fastattn.softmax, torch.ones(2, 2)).chosen)\n"
        "with fastattn.use_backend('torch'):\n"
        "    print(fastattn.explain(fastattn.softmax, torch.ones(2, 2)).chosen)\n"
    )
    assert run_python(code, "reference").stdout.split() == ["reference", "torch"]


def test_an_unknown_name_in_the_environment_is_named():
    code = "import torch, fastattn; fastattn.softmax(torch.ones(2))"
    result = run_python(code, "fast")
    assert "ValueError: FASTATTN_BACKEND is 'fast'; accepted are auto, cpu" in result.stderr


def run_python(code: str, backend: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FASTATTN_BACKEND": backend}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


@pytest.fixture
def watched(monkeypatch):
    """The names of the softmax backends whose fwd and bwd ran, in order."""
    calls = []
    for name, backend in _dispatch._ops["softmax"].items():
        for step in ("fwd", "bwd"):
            real = getattr(backend, step)

            def watch(*args, _real=real, _label=f"{name} {step}"):
                calls.append(_label)
                return _real(*args)

            monkeypatch.setitem(vars(backend), step, watch)
    return calls


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_the_backward_runs_where_the_forward_ran_after_the_block(watched, name):
    x = X.clone().requires_grad_()
    with use_backend(name):
        out = fastattn.softmax(x)
    out.sum().backward()
    assert watched == [f"{name} fwd", f"{name} bwd"]


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_the_backward_runs_where_the_forward_ran_on_another_thread(watched, name):
    x = X.clone().requires_grad_()
    with use_backend(name):
        out = fastattn.softmax(x)

    def backward():
        with use_backend("reference" if name == "torch" else "torch"):
            out.sum().backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert x.grad is not None and watched == [f"{name} fwd", f"{name} bwd"]


def test_explain_computes_nothing_and_names_every_backend(watched):
    before = torch.get_rng_state()
    found = explain(fastattn.softmax, X, mask=torch.ones(2, 3).bool())
    assert not watched and torch.equal(torch.get_rng_state(), before)
    assert found.op == "softmax" and found.device == "cpu"
    assert set(found.reasons) == set(_dispatch._ops["softmax"])
    assert found.reasons["reference"] is None and "mask" in found.reasons["torch"]
    lines = str(found).splitlines()
    assert lines[0] == f"softmax on cpu: {found.chosen}" and len(lines) == len(found.reasons) + 1
    assert all(found.reasons[name] or name in line
               for name, line in zip(found.reasons, lines[1:], strict=True))  # fmt: skip


def test_explain_takes_modules_and_keeps_the_generator():
    before = torch.get_rng_state()
    module = fastattn.MultiHeadAttention(4, 2, dropout=0.5, batch_first=True)
    torch.set_rng_state(before)
    assert explain(module, *[torch.ones(1, 3, 4)] * 3).op == "attention"
    assert torch.equal(torch.get_rng_state(), before)


def test_explain_of_a_forced_backend():
    with use_backend("reference"):
        assert explain(fastattn.softmax, X).chosen == "reference"
    with use_backend("triton"):
        assert explain(fastattn.softmax, X).chosen == ""


def test_explain_checks_the_call_and_leaves_no_trace():
    with pytest.raises(TypeError, match="x is int64"):
        explain(fastattn.softmax, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="called no fastattn op"):
        explain(torch.softmax, X, -1)
    assert fastattn.softmax(X).shape == X.shape
