"""Checkpoints that are whole or absent, and their average."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from examples.translation import checkpoint as checkpoints
from examples.translation.average import average_run, average_states
from examples.translation.average import main as average
from examples.translation.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    load_checkpoint,
    save_checkpoint,
)


def state(value, config=None):
    return {"model": {"w": torch.full((3,), float(value))}, "config": config or {}}


def refuse(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_sockeye_2_1_20_killed_between_two_writes(tmp_path, monkeypatch, moment):
    """Whatever stops the writing, the old file stays whole and nothing half lies about."""
    file = tmp_path / "step-00000001.pt"
    save_checkpoint(file, state(1))
    monkeypatch.setattr(checkpoints.os, moment, refuse)
    with pytest.raises(CheckpointError, match="can't write .*No space left"):
        save_checkpoint(file, state(2))
    assert load_checkpoint(file)["model"]["w"].tolist() == [1, 1, 1]
    assert os.listdir(tmp_path) == [file.name]


def test_what_a_killed_writer_left_is_no_checkpoint(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(1, state(1), keep=3)
    (tmp_path / "step-00000002.pt.part").write_bytes(b"PK half a file")
    assert [step for step, _ in folder.steps()] == [1]
    assert folder.newest() == tmp_path / "step-00000001.pt"


@pytest.mark.parametrize("keep", [0, 10, -40])
def test_a_truncated_file_costs_one_sentence(tmp_path, keep):
    file = tmp_path / "step-00000001.pt"
    save_checkpoint(file, state(1))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged or no checkpoint") as caught:
        load_checkpoint(file)
    assert "\n" not in str(caught.value)


def test_a_missing_file_costs_one_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "none.pt")


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_code_in_a_checkpoint_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Harmful()}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="damaged or no checkpoint"):
        load_checkpoint(tmp_path / "bad.pt")
    assert not (tmp_path / "harm").exists()


def test_the_last_k_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path / "deep" / "folder")
    for step in (5, 40, 300, 2000):
        folder.save(step, state(step), keep=2)
    assert [step for step, _ in folder.steps()] == [300, 2000]
    assert folder.has(300) and not folder.has(40)


def test_an_interrupted_run_goes_on_from_where_it_stopped(tmp_path):
    folder = CheckpointFolder(tmp_path)
    assert folder.newest() is None
    folder.save(10, state(10), keep=2)
    save_checkpoint(folder.interrupted, state(13))
    assert folder.newest() == folder.interrupted
    folder.save(20, state(20), keep=2)
    assert folder.newest() == tmp_path / "step-00000020.pt"
    assert not folder.interrupted.exists()


def test_fairseq_732_tied_tensors_are_averaged_once():
    states = []
    for value in (1.0, 3.0):
        tied = torch.full((2, 2), value)
        states.append({"embedding": tied, "output": tied, "other": torch.full((2, 2), 10 * value)})
    averaged = average_states(states)
    assert averaged["embedding"].tolist() == [[2, 2], [2, 2]]
    assert averaged["output"].data_ptr() == averaged["embedding"].data_ptr()
    assert averaged["other"].tolist() == [[20, 20], [20, 20]]
    assert states[0]["embedding"].tolist() == [[1, 1], [1, 1]]


def test_views_of_one_tensor_are_not_taken_for_tied():
    whole = torch.tensor([1.0, 2.0, 3.0, 4.0])
    averaged = average_states([{"a": whole[:2], "b": whole[2:]}])
    assert (averaged["a"].tolist(), averaged["b"].tolist()) == ([1, 2], [3, 4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fairseq_1079_half_checkpoints_are_averaged_in_fp32(dtype):
    """A sum of twenty in half precision would lose the small part, or overflow."""
    large = 20_000.0
    states = [{"w": torch.tensor([large, 1.0], dtype=dtype)} for _ in range(19)]
    states.append({"w": torch.tensor([large, 1.5], dtype=dtype)})
    averaged = average_states(states)["w"]
    assert averaged.dtype == dtype
    assert averaged[0] == torch.tensor(large, dtype=dtype)
    assert averaged[1] == torch.tensor(1.025, dtype=dtype)


def test_olmo_core_396_integers_come_from_the_last_checkpoint():
    states = [{"steps": torch.tensor(value), "w": torch.tensor(1.0 * value)} for value in (4, 9)]
    averaged = average_states(states)
    assert averaged["steps"].item() == 9 and averaged["steps"].dtype == torch.int64
    assert averaged["w"].item() == 6.5


def test_averages_of_different_models_are_refused():
    with pytest.raises(ValueError, match="different models"):
        average_states([{"w": torch.zeros(2)}, {"w": torch.zeros(3)}])
    with pytest.raises(ValueError, match="nothing to average"):
        average_states([])


def test_the_last_checkpoints_of_a_run_are_averaged(tmp_path, capsys):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (1, 2, 4):
        folder.save(step, state(step, {"of": step}), keep=9)
    averaged = average_run(tmp_path, 2)
    assert averaged["steps"] == [2, 4]
    assert load_checkpoint(tmp_path / "averaged.pt")["model"]["w"].tolist() == [3, 3, 3]
    assert average(["--run", str(tmp_path), "--last", "3"]) == 0
    assert "1, 2, 4" in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "averaged.pt")["config"] == {"of": 4}


def test_a_run_without_checkpoints_costs_one_sentence(tmp_path, capsys):
    assert average(["--run", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        average(["--run", str(tmp_path), "--last", "0"])
    assert caught.value.code == 2
