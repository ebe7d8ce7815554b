"""Everything that a GPU has to say about fastattn, in minutes: the only thing its owner runs.

    make gpu [GPU_ARGS='--minutes 10 --corpus FOLDER --newstest FOLDER']

Steps: what the machine is; the tests marked gpu; every backend against the float64 reference; speed
beside torch; then `base` trains on FOLDER, which prepare wrote, for the minutes that are left, and
translates and scores newstest2014 (newstest2014.en and .de in its folder). No network is used.
One gpu.json and its plots go to --out. --dry-run plans every step and runs none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_compare, gpu_speed

TRAINING = "examples.translation"
SLACK_SECONDS = 20  # for writing results
SCORING_SECONDS = 60


@dataclass
class Job:
    """What was asked for, and when it has to end."""

    minutes: float
    out: Path
    corpus: Path | None
    newstest: Path | None
    start: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float:
        return self.start + 60 * self.minutes - SLACK_SECONDS - time.monotonic()


@dataclass
class Step:
    """``obstacle`` says in one sentence why it can't run, or None; ``most``: its seconds."""

    name: str
    what: str
    most: float
    obstacle: Callable[[Job], str | None]
    run: Callable[[Job, float], Any]


def no_gpu(job: Job) -> str | None:
    if torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} finds no GPU"


def no_corpus(job: Job) -> str | None:
    if reason := no_gpu(job):
        return reason
    if job.corpus is None:
        return "no prepared corpus: say --corpus FOLDER, that examples.translation.prepare wrote"
    return None if job.corpus.is_dir() else f"{job.corpus} is no folder"


def no_newstest(job: Job) -> str | None:
    if reason := no_corpus(job):
        return reason
    if job.newstest is None:
        return "no test set: say --newstest FOLDER, with newstest2014.en and newstest2014.de"
    missing = [n for n in ("newstest2014.en", "newstest2014.de") if not (job.newstest / n).exists()]
    return f"{job.newstest} has no {' and no '.join(missing)}" if missing else None


def _module(*words: str, seconds: float) -> str:
    """The output of ``python -m`` something, which is an error if it fails or takes longer."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, seconds))
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def status(job: Job, seconds: float) -> Any:
    return json.loads(_module("fastattn", "--json", seconds=seconds))


def tests(job: Job, seconds: float) -> Any:
    report = job.out / "tests.xml"
    words = ("pytest", "-m", "gpu", "-q", f"--junit-xml={report}", "tests")
    return _module(*words, seconds=seconds).splitlines()[-1]


def compare(job: Job, seconds: float) -> Any:
    return gpu_compare.compare_all("cuda", seconds)


def speed(job: Job, seconds: float) -> Any:
    rows = gpu_speed.measure(seconds)
    gpu_speed.draw(rows, job.out)
    return rows


def train(job: Job, seconds: float) -> Any:
    minutes = max(0.1, (seconds - SCORING_SECONDS) / 60)
    return _module(
        f"{TRAINING}.train", "--data", str(job.corpus), "--run", str(job.out / "base"),
        "--config", "base", "--max-minutes", f"{minutes:.2f}", "--no-bar", seconds=seconds + 60,
    ).splitlines()[-5:]  # fmt: skip


def translate(job: Job, seconds: float) -> Any:
    found, given = job.out / "newstest2014.hyp", job.newstest
    assert given is not None
    words = ("--run", str(job.out / "base"), "--input", str(given / "newstest2014.en"))
    _module(f"{TRAINING}.translate", *words, "--output", str(found), seconds=seconds)
    words = ("--hyp", str(found), "--ref", str(given / "newstest2014.de"), "--lang", "de")
    return json.loads(_module(f"{TRAINING}.score", *words, "--json", seconds=seconds))


STEPS = (
    Step("status", "what the machine is and which backends run", 60, lambda job: None, status),
    Step("tests", "tests marked gpu", 90, no_gpu, tests),
    Step("compare", "every op and backend against the float64 reference", 60, no_gpu, compare),
    Step("speed", "every op beside torch: milliseconds, TFLOP/s, share of bandwidth", 120, no_gpu,
         speed),
    Step("train", "base, for the minutes that are left", 540, no_corpus, train),
    Step("translate", "newstest2014 translated and scored", 120, no_newstest, translate),
)  # fmt: skip


def run(job: Job, is_dry: bool) -> list[dict[str, Any]]:
    """One record a step: its state ("done", "skipped", "failed", "planned"), seconds, result."""
    records = []
    for step in STEPS:
        began = time.monotonic()
        record: dict[str, Any] = {"step": step.name, "what": step.what}
        reason = step.obstacle(job)
        seconds = min(step.most, job.seconds_left())
        if reason is None and seconds <= 0:
            reason = f"the {job.minutes:g} minutes are over"
        if reason is not None:
            record |= {"state": "skipped", "reason": reason}
        elif is_dry:
            record |= {"state": "planned", "seconds": step.most}
        else:
            try:
                record |= {"result": step.run(job, seconds), "state": "done"}
            except Exception as error:  # a step that fails must not cost the others' results
                record |= {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
            record["seconds"] = round(time.monotonic() - began, 1)
        records.append(record)
        print(f"{record['step']:<10} {record['state']:<8} {record.get('reason', record['what'])}")
    return records


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="of everything (default: 10)")
    parser.add_argument("--corpus", type=Path, help="folder that prepare wrote")
    parser.add_argument("--newstest", type=Path, help="folder of newstest2014.en and .de")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="default: runs/gpu")
    parser.add_argument("--dry-run", action="store_true", help="plan every step, run none")
    args = parser.parse_args(argv)
    if args.minutes <= 0:
        parser.error(f"argument --minutes: is {args.minutes:g}; a number above 0 is accepted")
    return args


def main(argv: list[str] | None = None) -> int:
    """0 if no step failed."""
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    job = Job(args.minutes, args.out, args.corpus, args.newstest)
    records = run(job, args.dry_run)
    path = args.out / "gpu.json"
    path.write_text(json.dumps({"minutes": args.minutes, "steps": records}, indent=1) + "\n")
    print(f"wrote {path}")
    return int(any(record["state"] == "failed" for record in records))


if __name__ == "__main__":
    sys.exit(main())
