"""The one script for machines with a GPU, as far as a machine without one can try it."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu, gpu_compare, gpu_speed

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run the steps")


@no_gpu
def test_a_dry_run_plans_every_step_and_says_why_not(tmp_path, capsys):
    assert gpu.main(["--dry-run", "--out", str(tmp_path)]) == 0
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert [step["step"] for step in steps] == [step.name for step in gpu.STEPS]
    assert steps[0]["state"] == "planned"
    assert all(s["state"] == "skipped" and "finds no GPU" in s["reason"] for s in steps[1:])
    printed = capsys.readouterr().out
    assert all(step.name in printed for step in gpu.STEPS)


def test_a_step_that_fails_costs_no_other_its_result(tmp_path, monkeypatch):
    def fail(job, seconds):
        raise ValueError("no such thing")

    monkeypatch.setattr(gpu, "STEPS", (
        gpu.Step("bad", "fails", 5, lambda job: None, fail),
        gpu.Step("good", "works", 5, lambda job: None, lambda job, seconds: 7),
        gpu.Step("shy", "declines", 5, lambda job: "not today", fail),
    ))  # fmt: skip
    assert gpu.main(["--out", str(tmp_path)]) == 1
    bad, good, shy = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert (bad["state"], bad["reason"]) == ("failed", "ValueError: no such thing")
    assert (good["state"], good["result"]) == ("done", 7)
    assert (shy["state"], shy["reason"]) == ("skipped", "not today")


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    job = gpu.Job(10, tmp_path, None, None)
    assert "--corpus" in gpu.no_corpus(job)
    job.corpus = tmp_path
    assert gpu.no_corpus(job) is None and "--newstest" in gpu.no_newstest(job)
    job.newstest = tmp_path
    assert "no newstest2014.en and no newstest2014.de" in gpu.no_newstest(job)
    job.minutes = 0.01
    assert gpu.run(job, False)[0]["reason"] == "the 0.01 minutes are over"


def test_wrong_minutes_are_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["--minutes", "0"])
    assert stopped.value.code == 2 and "--minutes" in capsys.readouterr().err


def test_the_comparison_runs_on_a_cpu_as_well():
    rows = gpu_compare.compare_all("cpu", 120)
    ran = [row for row in rows if "errors" in row]
    assert {row["backend"] for row in ran} >= {"reference", "torch"}
    assert not any(row.get("declined") == "no time left" for row in rows)
    for row in ran:
        allowed = 1e-4 if row["dtype"] == "torch.float32" else 0.05
        assert max(row["errors"]) < allowed, row


def test_every_case_of_speed_can_be_called():
    """On a CPU, smaller; the peers' GPU kernels apart."""
    for case in gpu_speed.cases("cpu", scale=512):
        case.ours()
        assert case.flops or case.bytes
        if not case.name.startswith("attention"):
            case.peers["torch"]()


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"limits": {}}, {"case": "a", "times": {"fastattn": 1.0, "torch": 2.0, "x": "no"}}]
    gpu_speed.draw(rows, tmp_path)
    assert (tmp_path / "gpu_speed.png").stat().st_size > 1000
