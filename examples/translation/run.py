"""The whole job, which `make train` calls: prepare, train, average, translate, score, draw.

    python -m examples.translation.run [--data DIR | --corpus NAME] [--run NAME]
        [--config tiny] [--max-minutes 10]

DIR holds train, val and test files (see corpora/files.py), or is a folder that prepare wrote.
Without it the corpus is multi30k where its home answers within seconds, else catalogs, a smoke
corpus. Everything goes to runs/NAME: data/ (the prepared corpus), what train writes, test.hyp,
attention.png and result.json. The same command on a run that was interrupted goes on with it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch

from examples.translation import attention_picture, train, translate
from examples.translation.cli import ArgumentParser
from examples.translation.config import load_config
from examples.translation.corpora import RawCorpus, default_corpus, open_corpus
from examples.translation.corpora.download import replace_text
from examples.translation.data import CorpusError, PreparedCorpus, Tokenizer
from examples.translation.lines import read_lines
from examples.translation.machine import commit, describe_machine
from examples.translation.prepare import prepare, report
from examples.translation.score import score, table

SHOWN = 5
DEFAULT_VOCAB_SIZE = 4000
_PICTURE_WORDS = range(6, 13)


class StepError(RuntimeError):
    """A step that failed, in one sentence; `status` is what the command exits with."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Clock:
    """Seconds of each step."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.monotonic()

    def lap(self, step: str) -> None:
        """Ends `step`, which began where the one before ended."""
        now = time.monotonic()
        self.seconds[step] = round(now - self._last, 1)
        self.seconds["total"] = round(now - self._start, 1)
        self._last = now


def run(options: argparse.Namespace) -> dict:
    """Does all steps and returns what stands in result.json.

    Raises StepError, ValueError or OSError, each one sentence.
    """
    config = load_config(options.config, options.overrides)  # before the data: it may be wrong
    if not options.max_minutes > 0:
        raise ValueError(f"--max-minutes must be positive, not {options.max_minutes:g}")
    if options.vocab_size is None:
        options.vocab_size = config.model.vocab_size or DEFAULT_VOCAB_SIZE
    folder = run_folder(options)
    clock = Clock()
    corpus, reason = prepared_corpus(options, folder / "data")
    print(f"corpus: {reason}\n{report(corpus.manifest)}", flush=True)
    clock.lap("prepare")

    here = ["--run", str(folder), "--device", options.device]
    limits = ["--config", options.config, "--max-minutes", f"{options.max_minutes:g}"]
    settings = [word for value in options.overrides for word in ("--set", value)]
    step("train", train.main, ["--data", str(corpus.path), *here, *limits, *settings])
    clock.lap("train")

    output = folder / "test.hyp"
    files = ["--input", str(corpus.path / "test.src"), "--output", str(output)]
    step("translate", translate.main, [*here, *files])
    clock.lap("translate")

    sources, references = (read_lines(corpus.path / f"test.{side}") for side in ("src", "tgt"))
    translations = read_lines(output)
    # Training is not thrown away because the user's own reference looks tokenised.
    scores = score(translations, [references], corpus.manifest["target"], force=True)
    clock.lap("score")

    result = _result(options, folder, corpus, reason, scores)
    _write_result(folder, result, clock)
    picture = folder / "attention.png"
    source, translation = _to_draw(corpus.tokenizer, sources, translations, references)
    texts = ["--text", source, "--translation", translation]
    step("attention_picture", attention_picture.main, [*here, *texts, "--out", str(picture)])
    clock.lap("picture")
    _write_result(folder, result, clock)
    print(_examples(sources, translations, references))
    print(_summary(result, scores, folder))
    return result


def run_folder(options: argparse.Namespace) -> Path:
    """runs/NAME; without a name, the first of tiny, tiny-2, ... that is not finished."""
    if options.run:
        return options.runs / options.run
    stem = Path(options.config).stem
    number = 1
    while (folder := options.runs / (stem if number == 1 else f"{stem}-{number}")).exists():
        if not (folder / "result.json").exists():
            break
        number += 1
    return folder


def prepared_corpus(options: argparse.Namespace, folder: Path) -> tuple[PreparedCorpus, str]:
    """The corpus in `folder`, prepared now if need be, and the sentence that says why this one.

    Raises CorpusError where the run was begun with another one.
    """
    if options.data and (options.data / "manifest.json").is_file():
        return PreparedCorpus(options.data), f"{options.data}, prepared before"
    if not folder.is_dir():
        raw, reason = _open(options)
        return prepare(raw, folder, vocab_size=options.vocab_size), reason
    corpus = PreparedCorpus(folder)
    wanted = {"source": options.source, "target": options.target}
    if options.data or options.corpus:
        wanted["corpus"] = options.corpus or f"files:{options.data.resolve().name}"
    for key, value in wanted.items():
        if corpus.manifest[key] != value:
            raise CorpusError(
                f"{folder} was prepared with {key} {corpus.manifest[key]!r}, not {value!r}: "
                "give another --run"
            )
    return corpus, f"{corpus.manifest['corpus']}, with which this run was begun"


def _open(options: argparse.Namespace) -> tuple[RawCorpus, str]:
    languages = options.source, options.target
    if options.data:
        name = Path(options.data).resolve().name
        return open_corpus(f"files:{options.data}", *languages), f"files in {name}"
    if options.corpus:
        return open_corpus(options.corpus, *languages), f"{options.corpus}, as asked"
    name, why = default_corpus(*languages)
    print(f"corpus: {name}, because {why}", flush=True)
    try:
        return open_corpus(name, *languages), f"{name}, because {why}"
    except CorpusError as error:
        if name == "catalogs":
            raise
        why = f"catalogs, because {name} answered but failed: {error}"
        return open_corpus("catalogs", *languages), why


def step(name: str, main: Callable[[list[str]], int], arguments: list[str]) -> None:
    """Calls a step's `main` and says how to do it by hand. Raises StepError where it fails."""
    print(f"\n$ python -m examples.translation.{name} {shlex.join(arguments)}", flush=True)
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 2
    if status:
        what = "was stopped" if status > 128 else "failed"
        raise StepError(f"{name} {what}; what is done is kept, the same command goes on", status)


def _to_draw(
    tokenizer: Tokenizer, sources: list[str], translations: list[str], references: list[str]
) -> tuple[str, str]:
    """The first sentence that is neither short nor long, with its translation.

    The reference takes the place of a translation that is empty or too long for a picture, as a
    model that has hardly learned may give.
    """
    full = [(source, n) for n, source in enumerate(sources) if source.strip()]
    if not full:
        raise ValueError("every line of the test set is empty: nothing to draw")
    source, n = next((s for s in full if len(s[0].split()) in _PICTURE_WORDS), full[0])
    fits = 0 < len(tokenizer.encode(translations[n])) <= attention_picture.MAX_TOKENS
    return source, translations[n] if fits else references[n]


def _result(
    options: argparse.Namespace, folder: Path, corpus: PreparedCorpus, reason: str, scores: dict
) -> dict:
    manifest = corpus.manifest
    training = json.loads((folder / "training.json").read_text("utf-8"))
    return {
        "sacrebleu_13a": scores["sacrebleu_13a"],
        "signature": scores["signatures"]["sacrebleu_13a"],
        "corpus": manifest["corpus"] + (" (smoke corpus)" if manifest["smoke"] else ""),
        "corpus_reason": reason,
        "languages": f"{manifest['source']}-{manifest['target']}",
        "test_files": manifest["splits"]["test"]["files"],
        "training_pairs": manifest["splits"]["train"]["pairs"],
        "vocab_size": manifest["vocab_size"],
        **training,
        "config": options.config,
        "overrides": options.overrides,
        "max_minutes": options.max_minutes,
        "device": options.device,
        "scores": scores,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
    }


def _write_result(folder: Path, result: dict, clock: Clock) -> None:
    result["seconds"] = dict(clock.seconds)
    text = json.dumps(result, indent=2, ensure_ascii=False)
    replace_text(folder / "result.json", text + "\n")


def _examples(sources: list[str], translations: list[str], references: list[str]) -> str:
    stride = max(1, len(sources) // SHOWN)
    lines = []
    for n in range(0, len(sources), stride)[:SHOWN]:
        lines += ["", f"source       {sources[n]}", f"translation  {translations[n]}"]
        lines += [f"reference    {references[n]}"]
    return "\n".join(lines)


def _summary(result: dict, scores: dict, folder: Path) -> str:
    lines = ["", table(scores), *(f"warning: {warning}" for warning in scores["warnings"]), ""]
    lines += [
        f"{result['corpus']}: {result['parameters'] / 1e6:.1f}M parameters, "
        f"{result['train_seconds'] / 60:.1f} minutes of training, "
        f"{result['target_tokens_per_second']:.0f} target tokens/s, "
        f"BLEU {result['sacrebleu_13a']:.2f} ({result['signature']})",
        f"attention picture: {folder / 'attention.png'}",
        f"result: {folder / 'result.json'}",
    ]
    if "(smoke corpus)" in result["corpus"]:
        lines.append("This is a smoke corpus: the score compares with nothing published.")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="run", description=__doc__.partition("\n\n")[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--data", type=Path, help="folder of text files, or one that prepare wrote")
    where.add_argument("--corpus", help="a corpus by name, as prepare takes it")
    parser.add_argument("--run", help="name of the run (default: that of the config)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--config", default="tiny", help="tiny, base, big or a TOML file")
    parser.add_argument("--max-minutes", type=float, default=10, help="of training (default: 10)")
    parser.add_argument("--source", default="en", help="language code (default: en)")
    parser.add_argument("--target", default="de", help="language code (default: de)")
    parser.add_argument("--vocab-size", type=int, help="default: the config's, else 4000")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="a config value, as in --set dropout=0.2; may be repeated",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.corpus and options.corpus.startswith("files:"):
        options.data, options.corpus = Path(options.corpus.removeprefix("files:")), None
    try:
        run(options)
    except StepError as error:
        print(f"run: {error}", file=sys.stderr)
        return error.status
    except (ValueError, OSError) as error:
        print(f"run: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
