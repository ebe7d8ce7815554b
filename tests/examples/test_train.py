"""Training: schedule, loss, accumulation, and runs that stop and go on."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import make_corpus

import fastattn
from examples.translation.checkpoint import load_checkpoint
from examples.translation.config import TrainingConfig, load_config
from examples.translation.data import PreparedCorpus, TokenBatches, collate
from examples.translation.engine import (
    Engine,
    TrainingError,
    UpdateStream,
    batch_loss,
    validation_loss,
)
from examples.translation.optim import adam, learning_rate
from examples.translation.train import Run, main


@pytest.fixture(scope="module")
def corpus(toy_corpus):
    return PreparedCorpus(toy_corpus)


@pytest.fixture
def engine(corpus, toy_config):
    return Engine(load_config(toy_config), corpus)


def toy(toy_config, **changes):
    return load_config(toy_config, [f"{key}={value}" for key, value in changes.items()])


def weights(engine):
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    assert not [name for name in first if not torch.equal(first[name], second[name])]


def records(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("name", "peak"), [("base", 6.99e-4), ("big", 4.94e-4)])
def test_the_rate_peaks_at_the_end_of_the_warmup(name, peak):
    config = load_config(name)
    d_model, warmup = config.model.d_model, config.training.warmup_steps
    rates = [learning_rate(step, d_model, warmup) for step in range(1, 10_001)]
    assert max(rates) == rates[warmup - 1] == pytest.approx(peak, rel=1e-3)
    assert rates[999] == pytest.approx(max(rates) / 4)
    assert rates[9999] == pytest.approx(d_model**-0.5 * 0.01)
    assert learning_rate(7, d_model, warmup, 2.5) == pytest.approx(2.5 * rates[6])


def test_transformers_34754_the_first_step_has_a_rate(engine):
    with pytest.raises(ValueError, match="step must be at least 1"):
        learning_rate(0, 512, 4000)
    before = weights(engine)
    engine.update(next(engine.stream))
    rate = engine.optimizer.param_groups[0]["lr"]
    assert rate == learning_rate(1, 32, 60, 0.3) > 0
    assert not torch.equal(before["embedding.weight"], engine.model.embedding.weight)


def test_the_optimizer_is_the_papers():
    optimizer = adam([torch.nn.Parameter(torch.zeros(2))], TrainingConfig())
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-9)
    assert (group["weight_decay"], group["fused"]) == (0, True)


@pytest.mark.parametrize("smoothing", ["exclusive", "uniform"])
def test_fairseq_3182_label_smoothing_of_ten_classes(smoothing):
    """V = 10, eps = .1: the target has .9 and the others 1/90 each; uniform: .91 and .01."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4, dtype=torch.float64), torch.randn(10, 4, dtype=torch.float64)
    target = torch.tensor([1, 9, 0, 4, 4, 7])
    on, off = (0.9, 0.1 / 9) if smoothing == "exclusive" else (0.91, 0.01)
    wanted = torch.full((6, 10), off, dtype=torch.float64)
    wanted[torch.arange(6), target] = on
    assert wanted.sum(1).tolist() == pytest.approx([1.0] * 6)
    log_probabilities = (hidden @ weight.T).log_softmax(1)
    loss, nll = fastattn.linear_cross_entropy(
        hidden, weight, target, label_smoothing=0.1, smoothing=smoothing, reduction="sum",
        return_nll=True,
    )  # fmt: skip
    assert loss.item() == pytest.approx(-(wanted * log_probabilities).sum().item(), rel=1e-12)
    nll_of_targets = -log_probabilities[torch.arange(6), target].sum().item()
    assert nll.item() == pytest.approx(nll_of_targets, rel=1e-12)


def test_the_batch_loss_is_the_exclusive_one_over_all_but_padding(engine):
    batch = collate(engine.ids, [0, 1, 2, 3])
    logits = engine.model(batch.source, batch.target_in, batch.source_padding)
    log_probabilities = logits.log_softmax(-1)
    size = logits.shape[-1]
    real = batch.target_out != 0
    assert int(real.sum()) == batch.num_target_tokens < batch.target_out.numel()
    picked = log_probabilities.gather(-1, batch.target_out[..., None])[..., 0]
    others = log_probabilities.sum(-1) - picked
    expected = -(0.9 * picked + 0.1 / (size - 1) * others)[real].sum()
    loss, nll = batch_loss(engine.model, batch, engine.config)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nll, -picked[real].sum())
    engine.model.eval()
    torch.testing.assert_close(batch_loss(engine.model, batch, engine.config)[0], nll)


def test_transformers_5919_half_the_batch_padding(engine):
    lengths = engine.ids.target_lengths
    short, long = int(lengths.argmin()), int(lengths.argmax())
    assert 2 * lengths[short] <= lengths[long]
    together = collate(engine.ids, [short, long])
    apart = [collate(engine.ids, [index]) for index in (short, long)]
    loss, nll = batch_loss(engine.model, together, engine.config)
    expected = [batch_loss(engine.model, batch, engine.config) for batch in apart]
    torch.testing.assert_close(loss, expected[0][0] + expected[1][0])
    torch.testing.assert_close(nll, expected[0][1] + expected[1][1])


def test_opennmt_py_526_accumulation_of_10_and_90_tokens_is_one_batch_of_100(corpus, toy_config):
    engines = [Engine(load_config(toy_config), corpus) for _ in range(2)]
    small, large = _indices_of(corpus, 10), _indices_of(corpus, 90, start=1000)
    first = engines[0].update([small, large])
    second = engines[1].update([np.concatenate([small, large])])
    assert (first.tokens, second.tokens) == (100, 100)
    assert first[:3] == pytest.approx(second[:3], rel=1e-5)
    gradients = [[p.grad for p in engine.model.parameters()] for engine in engines]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def _indices_of(corpus, tokens, start=0):
    """Sentences of exactly `tokens` target tokens together."""
    lengths = corpus.split("train").target_lengths
    chosen = []
    for index in range(start, len(lengths)):
        left = tokens - sum(lengths[i] for i in chosen) - lengths[index]
        if left == 0 or left >= lengths.min():
            chosen.append(index)
        if left == 0:
            return np.array(chosen)
    raise AssertionError("no such sentences")


@pytest.mark.parametrize("max_tokens", [40, 100, 250, 700])
def test_tensor2tensor_444_tokens_per_update_do_not_depend_on_the_micro_batch(corpus, max_tokens):
    ids = corpus.split("train")
    stream = UpdateStream(TokenBatches(ids, max_tokens, 1, 16), ids, 600)
    for _ in range(40):
        update = next(stream)
        tokens = [int(ids.target_lengths[indices].sum()) for indices in update]
        assert len(update) == 1 or abs(sum(tokens) - 600) <= max_tokens / 2


def test_every_epoch_holds_every_pair_once_in_another_order(corpus):
    ids = corpus.split("train")
    batches = TokenBatches(ids, 100, 1, 16)
    stream = UpdateStream(batches, ids, 600)
    micro_batches = []
    while stream.position[0] < 2:
        micro_batches += next(stream)
    per_epoch = len(batches.epoch(0))
    epochs = [np.concatenate(micro_batches[start : start + per_epoch]) for start in (0, per_epoch)]
    assert all(sorted(epoch) == list(range(len(ids))) for epoch in epochs)
    assert list(epochs[0]) != list(epochs[1])
    again = UpdateStream(batches, ids, 600, stream.position)
    assert [list(i) for i in next(stream)] == [list(i) for i in next(again)]


@pytest.mark.parametrize("stop_at", [1, 7, 10, 13])
def test_joeynmt_125_fairseq_1375_a_stopped_and_resumed_run_has_the_same_bits(
    corpus, toy_config, tmp_path, stop_at
):
    """Stopped before the first checkpoint, between two, on one and after it; dropout is on."""
    config = toy(toy_config, dropout=0.2, max_steps=20, checkpoint_steps=10, tokens_per_update=300)
    unbroken = Run(tmp_path / "unbroken", config, corpus)
    assert unbroken.train(bar=False)

    torch.manual_seed(99)
    broken = Run(tmp_path / "broken", config, corpus)
    update = broken.engine.update

    def update_then_stop(batches):
        done = update(batches)
        broken.stop_requested = broken.engine.step == stop_at
        return done

    broken.engine.update = update_then_stop
    assert not broken.train(bar=False)
    torch.manual_seed(100)
    resumed = Run(tmp_path / "broken", config, corpus)
    assert resumed.engine.step == stop_at
    assert resumed.train(bar=False)
    assert_same_bits(weights(unbroken.engine), weights(resumed.engine))
    averages = [load_checkpoint(tmp_path / name / "averaged.pt") for name in ("unbroken", "broken")]
    assert averages[0]["steps"] == averages[1]["steps"]
    assert_same_bits(averages[0]["model"], averages[1]["model"])


def test_sockeye_890_925_the_schedule_goes_on(corpus, toy_config, tmp_path):
    config = toy(toy_config, log_steps=1, checkpoint_steps=4)
    for steps in (6, 12):
        training = dataclasses.replace(config.training, max_steps=steps)
        Run(tmp_path, dataclasses.replace(config, training=training), corpus).train(bar=False)
    rates = [line["rate"] for line in records(tmp_path) if line["kind"] == "train"]
    assert rates == [learning_rate(step, 32, 60, 0.3) for step in range(1, 13)]


def test_killed_and_terminated_processes_lose_nothing(toy_corpus, toy_config, corpus, tmp_path):
    """kill -9, then SIGTERM, each once a checkpoint is there; then to the end in this process."""
    run = tmp_path / "run"
    settings = {"dropout": 0.1, "checkpoint_steps": 5, "max_steps": 60}
    command = [sys.executable, "-m", "examples.translation.train", "--no-bar", "--device", "cpu"]
    command += ["--data", str(toy_corpus), "--run", str(run), "--config", str(toy_config)]
    for key, value in settings.items():
        # The processes never finish by themselves, however fast the machine is.
        command += ["--set", f"{key}={10**6 if key == 'max_steps' else value}"]
    statuses = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        before = _newest_step(run)
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while _newest_step(run) <= before and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        statuses.append(process.returncode)
    assert statuses == [-signal.SIGKILL, 128 + signal.SIGTERM]
    assert "stopped and saved" in errors

    config = toy(toy_config, **settings)
    resumed = Run(run, config, corpus)
    steps = max(resumed.engine.step + 2, 60)
    training = dataclasses.replace(config.training, max_steps=steps)
    config = dataclasses.replace(config, training=training)
    assert Run(run, config, corpus).train(bar=False)
    unbroken = Run(tmp_path / "unbroken", config, corpus)
    assert unbroken.train(bar=False)
    final = load_checkpoint(run / "checkpoints" / f"step-{steps:08d}.pt")
    assert_same_bits(unbroken.engine.model.state_dict(), final["model"])
    logged = [line["step"] for line in records(run) if line["kind"] == "train"]
    assert logged == list(range(10, steps + 1, 10))


def _newest_step(run):
    steps = [int(file.stem[5:]) for file in (run / "checkpoints").glob("step-*.pt")]
    return max(steps, default=0)


def test_fairseq_512_divergence_stops_with_the_last_good_checkpoint(
    toy_corpus, toy_config, tmp_path, capsys, monkeypatch
):
    update = Engine.update

    def diverging(self, batches):
        if self.step == 12:
            self.model.embedding.weight.data[5] = math.inf
        return update(self, batches)

    monkeypatch.setattr(Engine, "update", diverging)
    arguments = ["--data", toy_corpus, "--run", tmp_path, "--config", toy_config, "--no-bar"]
    assert main([str(a) for a in [*arguments, "--set", "checkpoint_steps=10"]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "step 13 has loss nan" in error and "step-00000010.pt" in error
    kept = load_checkpoint(tmp_path / "checkpoints" / "step-00000010.pt")
    assert all(tensor.isfinite().all() for tensor in kept["model"].values())
    assert "grad_norm" in records(tmp_path)[0]


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(engine):
    engine.update(next(engine.stream))
    before = weights(engine)
    weight = engine.model.decoder.layers[0].feed_forward.inner.weight
    weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingError, match=r"step 2 has loss \d.* gradient norm (inf|nan)"):
        engine.update(next(engine.stream))
    assert engine.step == 1
    assert_same_bits(before, weights(engine))


def test_tensorflow_models_9830_another_vocabulary_size_is_an_error_at_start(
    toy_corpus, toy_config, tmp_path, capsys
):
    arguments = ["--data", toy_corpus, "--run", tmp_path / "run", "--config", toy_config]
    assert main([str(a) for a in [*arguments, "--set", "vocab_size=99"]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "vocab_size is 99 in the config, but 25 in" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [("d_ff=48", "d_ff = 64, not 48"), ("seed=5", "seed = 1, not 5")],
)
def test_a_run_is_not_resumed_with_another_config(
    toy_run, toy_corpus, toy_config, tmp_path, capsys, change, words
):
    run = shutil.copytree(toy_run, tmp_path / "run")
    before = (run / "config.toml").read_text()
    arguments = ["--data", toy_corpus, "--run", run, "--config", toy_config, "--set", change]
    assert main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error and "another --run" in error
    assert (run / "config.toml").read_text() == before


def test_a_run_is_not_resumed_on_another_corpus(toy_run, toy_config, tmp_path, capsys):
    run = shutil.copytree(toy_run, tmp_path / "run")
    other = make_corpus(tmp_path / "other", 1500, seed=8)
    arguments = ["--data", other, "--run", run, "--config", toy_config]
    assert main([str(a) for a in arguments]) == 2
    assert "another subword model" in capsys.readouterr().err
    shutil.copyfile(other / "spm.model", run / "spm.model")
    assert main([str(a) for a in arguments]) == 2
    assert "started on 2000 pairs, this corpus has 1500" in capsys.readouterr().err


def test_max_minutes_counts_earlier_parts_of_the_run(corpus, toy_config, tmp_path):
    config = load_config(toy_config)
    first = Run(tmp_path, config, corpus)
    assert first.train(max_minutes=0.01, bar=False)
    assert first.elapsed >= 0.6
    again = Run(tmp_path, config, corpus)
    assert again.elapsed == first.elapsed and again.engine.step == first.engine.step
    assert again.train(max_minutes=0.01, bar=False)
    assert again.engine.step == first.engine.step


def test_what_a_run_leaves_behind(toy_run, corpus, toy_config):
    summary = json.loads((toy_run / "training.json").read_text())
    config = load_config(toy_config)
    assert summary["steps"] == config.training.max_steps
    assert summary["averaged_steps"] == [260, 280, 300]
    assert summary["parameters"] == sum(
        tensor.numel() for tensor in load_checkpoint(toy_run / "averaged.pt")["model"].values()
    )
    speed = summary["target_tokens"] / summary["train_seconds"]
    assert summary["target_tokens_per_second"] == pytest.approx(speed)
    log = [line for line in records(toy_run) if line["kind"] == "train"]
    assert [line["step"] for line in log] == list(range(10, 301, 10))
    keys = {"loss", "nll", "ppl", "rate", "grad_norm", "tokens_per_second", "tokens_per_update"}
    assert keys <= log[0].keys()
    assert all(abs(line["tokens_per_update"] - 600) < 350 for line in log)
    assert load_config(toy_run / "config.toml").model.vocab_size == corpus.vocab_size
    assert list((toy_run / "tensorboard").glob("events*"))


def test_the_model_learns_and_the_perplexity_is_un_smoothed(toy_run, corpus, toy_config):
    validation = [line["ppl"] for line in records(toy_run) if line["kind"] == "validation"]
    summary = json.loads((toy_run / "training.json").read_text())
    assert validation[0] > 1.5 * validation[-1]
    # With eps = .1 even a perfect smoothed model would not come below 1.4 by its smoothed loss.
    assert summary["validation_ppl_averaged"] < 1.35
    engine = Engine(load_config(toy_config), corpus)
    engine.model.load_state_dict(load_checkpoint(toy_run / "averaged.pt")["model"])
    ppl = math.exp(validation_loss(engine.model, corpus.split("val"), engine.config))
    assert ppl == pytest.approx(summary["validation_ppl_averaged"], rel=1e-5)
    assert engine.model.training


def test_bf16_products_learn_as_well(corpus, toy_config):
    engine = Engine(toy(toy_config, precision="bf16"), corpus)
    losses = [engine.update(next(engine.stream)).nll for _ in range(40)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert all(p.dtype == torch.float32 for p in engine.model.parameters())


@pytest.mark.parametrize("capable", [True, False])
def test_auto_precision_is_settled_by_the_device(
    corpus, toy_config, tmp_path, monkeypatch, capable
):
    capabilities = {"avx512_bf16": capable, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    run = Run(tmp_path, toy(toy_config, precision="auto"), corpus)
    expected = "bf16" if capable else "fp32"
    assert run.engine.config.training.precision == expected
    assert load_config(tmp_path / "config.toml").training.precision == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--data": "nowhere"}, "nowhere is no prepared corpus"),
        ({"--config": "nothing"}, "no config file nothing"),
        ({"--set": "layerz=3"}, "unknown key 'layerz'"),
        ({"--set": "max_tokens=3"}, "max_tokens=3 is too small"),
        ({"--set": "max_length=1"}, "no pair of at most max_length=1"),
        ({"--max-steps": "0"}, "max_steps must be positive"),
        ({"--max-minutes": "-1"}, "--max-minutes must be positive"),
    ],
)
def test_wrong_arguments_cost_one_sentence(
    toy_corpus, toy_config, tmp_path, capsys, changes, words
):
    options = {"--data": toy_corpus, "--run": tmp_path / "run", "--config": toy_config} | changes
    assert main([str(word) for pair in options.items() for word in pair]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_costs_one_sentence(toy_run, toy_corpus, toy_config, tmp_path, capsys):
    run = shutil.copytree(toy_run, tmp_path / "run")
    newest = run / "checkpoints" / "step-00000300.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    arguments = ["--data", toy_corpus, "--run", run, "--config", toy_config]
    assert main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "step-00000300.pt is damaged" in error
