"""``python -m fastattn``: the report is true, whatever machine it is asked on."""

import json
import os
import stat
import subprocess
import sys

import pytest
import torch

from fastattn import _gpus, _native, _status
from fastattn.__main__ import main
from fastattn._dispatch import registered_ops

CU126 = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
NEWEST = "pip install --force-reinstall torch"
ARCHS_CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
ARCHS_CU128 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
ARCHS_CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120"]
P100, V100, T4, H100, RTX5090 = (6, 0), (7, 0), (7, 5), (9, 0), (12, 0)


@pytest.fixture
def plug_in(monkeypatch):
    """Makes torch believe it is ``cuda``'s build with ``archs`` beside one GPU."""

    def plug(name, capability, cuda, archs):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: archs)

    return plug


@pytest.fixture
def driver_lists(monkeypatch, tmp_path):
    """Puts an ``nvidia-smi`` that prints ``text`` first on the path."""

    def put(text, exit_code=0):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {exit_code}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    return put


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "fastattn", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


@pytest.mark.parametrize(
    ("archs", "capability", "fits"),
    [
        (ARCHS_CU126, P100, True),
        (ARCHS_CU126, (6, 1), True),  # machine code of a lower minor version runs
        (ARCHS_CU126, (3, 7), False),
        (ARCHS_CU126, (8, 9), True),
        (ARCHS_CU126, RTX5090, False),
        (ARCHS_CU128, P100, False),
        (ARCHS_CU128, V100, False),
        (ARCHS_CU128, T4, True),
        (ARCHS_CU128, (13, 0), True),  # by the PTX of compute_120
        (ARCHS_CU130, P100, False),
        (ARCHS_CU130, H100, True),
        (["compute_60"], P100, True),
        (["compute_60"], (5, 2), False),
        (["sm_86"], (8, 0), False),
        (["sm_90a"], H100, True),
        (["sm_100a"], (10, 3), False),
        (["compute_100a"], (12, 0), False),
        (["sm_100f"], (10, 3), True),
        (["sm_100f"], (12, 0), False),
        (["compute_100f"], (12, 0), False),
        ([], P100, False),
        (["gfx90a"], P100, False),
    ],
)
def test_which_builds_hold_code_for_which_gpu(archs, capability, fits):
    assert _gpus.has_code_for(archs, capability) is fits


@pytest.mark.parametrize("cuda, archs", [("12.8", ARCHS_CU128), ("13.0", ARCHS_CU130)])
def test_a_p100_this_torch_cannot_serve_gets_the_command_that_helps(plug_in, capsys, cuda, archs):
    plug_in("Tesla P100-PCIE-16GB", P100, cuda, archs)
    assert main([]) == 0
    text = capsys.readouterr().out
    assert f"what helps: {CU126}\n" in text
    assert f"cuda:0: Tesla P100-PCIE-16GB, sm_60: this torch (CUDA {cuda}, sm_75" in text
    assert "no newer than R580" in text
    assert "softmax on cpu" in text and "on cuda:0" not in text


def test_a_p100_under_cuda_12_6_is_fine(plug_in):
    plug_in("Tesla P100-PCIE-16GB", P100, "12.6", ARCHS_CU126)
    assert _gpus.find_gpus() == [_gpus.Gpu("cuda:0", "Tesla P100-PCIE-16GB", P100)]


def test_a_gpu_newer_than_this_torch_gets_the_newest(plug_in):
    plug_in("RTX 5090", RTX5090, "12.6", ARCHS_CU126)
    (gpu,) = _gpus.find_gpus()
    assert gpu.command == NEWEST


def test_a_gpu_too_old_for_every_torch_is_told_so(plug_in):
    plug_in("Tesla K80", (3, 7), "12.6", ARCHS_CU126)
    (gpu,) = _gpus.find_gpus()
    assert gpu.command is None
    assert gpu.problem.endswith("no build of torch 2.7 or newer does")


@pytest.mark.parametrize(
    ("line", "cuda", "problem", "command"),
    [
        ("Tesla P100-PCIE-16GB, 6.0, 570.86.15", None, "this torch is a CPU build", CU126),
        ("Tesla T4, 7.5, 580.65.06", None, "this torch is a CPU build", NEWEST),
        ("Tesla T4, 7.5, 535.104.05", "13.0", "driver 535.104.05 is too old", CU126),
        ("NVIDIA H100, 9.0, 535.104.05", None, "this torch is a CPU build", CU126),
        ("NVIDIA H100, 9.0, 580.65.06", "13.0", "torch sees no GPU", None),
    ],
)
def test_a_gpu_that_torch_does_not_see(driver_lists, monkeypatch, line, cuda, problem, command):
    driver_lists(line)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (gpu,) = _gpus.find_gpus()
    assert gpu.device is None and gpu.name == line.split(",")[0]
    assert problem in gpu.problem
    assert gpu.command == command


def test_hidden_gpus_are_explained(driver_lists, monkeypatch):
    driver_lists("NVIDIA H100, 9.0, 580.65.06")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (gpu,) = _gpus.find_gpus()
    assert "CUDA_VISIBLE_DEVICES is ''" in gpu.problem


@pytest.mark.parametrize(
    "answer, code", [("NVIDIA-SMI has failed", 9), ("Field is not valid", 0), ("", 0)]
)
def test_a_driver_tool_that_fails_means_no_gpu(driver_lists, capsys, answer, code):
    driver_lists(answer, code)
    assert main([]) == 0
    assert "no GPU found" in capsys.readouterr().out


def test_every_op_is_reported():
    ops = _status.collect()["ops"]
    assert set(ops) == set(registered_ops())
    for rows in ops.values():
        assert [row["backend"] for row in rows["cpu"]] == ["cpu", "torch", "reference"]
        assert sum(row["runs"] for row in rows["cpu"]) == 1


def test_a_backend_is_out_for_the_reason_a_call_would_meet(monkeypatch):
    monkeypatch.setattr(_native, "_load", lambda: (None, "no compiler was there"))
    status = _status.collect()
    assert status["native"] == {"available": False, "reason": "no compiler was there"}
    rows = {row["backend"]: row for row in status["ops"]["softmax"]["cpu"]}
    assert rows["cpu"] == {"backend": "cpu", "runs": False, "reason": "no compiler was there"}
    assert rows["torch"]["runs"]


@pytest.mark.skipif(not _native.available(), reason="this platform has no native kernels")
def test_native_part():
    found = _status.collect()["native"]
    assert found["active"] in found["instruction_sets"]
    assert found["threads"] == found["torch_threads"] == torch.get_num_threads()
    assert found["shares_openmp"] and any("omp" in path for path in found["openmp"])


def test_the_text_of_a_fresh_process():
    result = run()
    assert (result.returncode, result.stderr) == (0, "")
    assert f"torch {torch.__version__}" in result.stdout
    assert "  softmax on cpu\n" in result.stdout


def test_json_obeys_the_environment():
    result = run("--json", FASTATTN_BACKEND="reference")
    assert (result.returncode, result.stderr) == (0, "")
    status = json.loads(result.stdout)
    assert status["environment"]["FASTATTN_BACKEND"] == "reference"
    for devices in status["ops"].values():
        assert [row["backend"] for row in devices["cpu"] if row["runs"]] == ["reference"]


def test_wrong_settings_are_reported_not_raised():
    result = run("status", FASTATTN_BACKEND="gpu", FASTATTN_CPU_ISA="mmx")
    assert (result.returncode, result.stderr) == (0, "")
    assert "unknown backend 'gpu'; accepted are auto, cpu" in result.stdout
    assert not _native.available() or "FASTATTN_CPU_ISA='mmx' is not built" in result.stdout


@pytest.mark.parametrize("arguments", [["statsu"], ["--jsn"], ["status", "extra"]])
def test_a_wrong_argument_costs_one_line(arguments):
    result = run(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert arguments[-1] in result.stderr


def test_a_reader_that_stops_early_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "fastattn"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(120) == 0
