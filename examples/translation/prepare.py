"""Text to a prepared corpus: cleaned, counted, cut into subwords, written as binary ids.

    python -m examples.translation.prepare --corpus multi30k --out data/multi30k
    python -m examples.translation.prepare --corpus files:my_texts --out data/mine --target fr
    python -m examples.translation.prepare --train a.en a.de --val b.en b.de --test c.en c.de \\
        --out data/mine

Training and validation lose pairs with an empty side, training also repeated pairs and those with
more than `--max-length` tokens on a side, EOS counted; all are counted in the manifest by reason.
The test set stays line for line. `manifest.json` has the keys

    format, corpus, smoke, notes, details, source, target, vocab_size, id_dtype, max_length,
    character_coverage
    splits   of train and val: lines, pairs, source_tokens, target_tokens (EOS counted), dropped
             of test: files, pairs, empty_sources
    train_sources_in_test   training pairs whose source sentence is also in the test set
    inputs, outputs         SHA-256 by file name
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

from examples.translation.aligned import SIDES, check_aligned, clean_text, copy_test
from examples.translation.cli import ArgumentParser
from examples.translation.corpora import FilePair, RawCorpus, open_corpus
from examples.translation.corpora.download import sha256
from examples.translation.data import FORMAT, CorpusError, IdWriter, PreparedCorpus, Tokenizer
from examples.translation.lines import iter_lines
from examples.translation.subwords import learn_subwords

_CHUNK = 20_000


def prepare(
    corpus: RawCorpus,
    out: str | Path,
    *,
    vocab_size: int = 8000,
    max_length: int = 256,
    character_coverage: float | None = None,
    keep_duplicates: bool = False,
    overwrite: bool = False,
) -> PreparedCorpus:
    """Writes `corpus` to the folder `out`, whole or not at all.

    max_length: tokens of a training pair's side, EOS counted. character_coverage: share of the
    training characters that get a subword; None: all, or 0.9995 beyond a million pairs.
    Raises CorpusError where files are not aligned, too little is left, or `out` is there already.
    """
    out = Path(out)
    if out.exists() and not overwrite:
        raise CorpusError(f"{out} is there already: choose another folder or give --overwrite")
    if max_length < 2:
        raise CorpusError(f"max_length must be at least 2 (one token and EOS), not {max_length}")
    for pair in (*corpus.train, *corpus.val, *corpus.test):
        check_aligned(pair)
    part = out.with_name(f"{out.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    try:
        manifest = _build(corpus, part, vocab_size, max_length, character_coverage, keep_duplicates)
        _write_manifest(part, manifest)
        _put_in_place(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return PreparedCorpus(out)


def _build(
    corpus: RawCorpus,
    folder: Path,
    vocab_size: int,
    max_length: int,
    character_coverage: float | None,
    keep_duplicates: bool,
) -> dict:
    splits: dict[str, dict] = {}
    splits["test"], test_sources = copy_test(corpus.test, folder)
    texts = {
        split: [folder / f"{split}.{side}.text" for side in SIDES] for split in ("train", "val")
    }
    splits["train"] = clean_text(corpus.train, texts["train"], not keep_duplicates)
    splits["val"] = clean_text(corpus.val, texts["val"], False)
    overlap = sum(line in test_sources for line in iter_lines(texts["train"][0]))
    if character_coverage is None:
        character_coverage = 1.0 if splits["train"]["pairs"] <= 1_000_000 else 0.9995
    model = learn_subwords(texts["train"], vocab_size, character_coverage)
    (folder / "spm.model").write_bytes(model)
    tokenizer = Tokenizer(folder / "spm.model")
    id_dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    for split, paths in texts.items():
        limit = max_length if split == "train" else None
        _encode(tokenizer, paths, folder / split, id_dtype, limit, splits[split])
        if not splits[split]["pairs"]:
            raise CorpusError(f"no {split} pair is left: dropped {splits[split]['dropped']}")
        for path in paths:
            path.unlink()
    return {
        "format": FORMAT,
        "corpus": corpus.name,
        "smoke": corpus.smoke,
        "notes": list(corpus.notes),
        "details": corpus.details,
        "source": corpus.source,
        "target": corpus.target,
        "vocab_size": tokenizer.vocab_size,
        "id_dtype": id_dtype,
        "max_length": max_length,
        "character_coverage": character_coverage,
        "splits": splits,
        "train_sources_in_test": overlap,
        "inputs": _hashes(
            [
                path
                for split in (corpus.train, corpus.val, corpus.test)
                for pair in split
                for path in pair
            ]
        ),
    }


def _encode(
    tokenizer: Tokenizer,
    texts: list[Path],
    prefix: Path,
    dtype: str,
    max_length: int | None,
    counts: dict,
) -> None:
    """Writes the ids of the pairs that are short enough, and completes the split's `counts`."""
    writers = [IdWriter(f"{prefix}.{side}", dtype) for side in SIDES]
    sides = [iter_lines(path) for path in texts]
    too_long = 0
    while chunk := [list(islice(side, _CHUNK)) for side in sides]:
        if not chunk[0]:
            break
        for pair in zip(*map(tokenizer.encode_batch, chunk), strict=True):
            if max_length is not None and max(map(len, pair)) + 1 > max_length:
                too_long += 1
                continue
            for writer, ids in zip(writers, pair, strict=True):
                writer.write(ids)
    counts["source_tokens"], counts["target_tokens"] = (writer.close() for writer in writers)
    counts["pairs"] -= too_long
    if too_long:
        counts["dropped"][f"more than {max_length} tokens"] = too_long


def _hashes(paths: list[Path]) -> dict[str, str]:
    names = Counter(Path(path).name for path in paths)
    return {
        path.name if names[path.name] == 1 else f"{path.parent.name}/{path.name}": sha256(path)
        for path in map(Path, paths)
    }


def _write_manifest(folder: Path, manifest: dict) -> None:
    manifest["outputs"] = _hashes(sorted(folder.iterdir()))
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    (folder / "manifest.json").write_text(text, "utf-8")


def _put_in_place(part: Path, out: Path) -> None:
    for path in (*part.iterdir(), part):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    old = out.with_name(f"{out.name}.old-{os.getpid()}")
    if out.exists():
        os.replace(out, old)
    os.replace(part, out)
    shutil.rmtree(old, ignore_errors=True)


def report(manifest: dict) -> str:
    """What was prepared, in a few lines for people."""
    lines = [
        f"{manifest['corpus']}{' (smoke corpus)' if manifest['smoke'] else ''}: "
        f"{manifest['source']} to {manifest['target']}, {manifest['vocab_size']} subwords"
    ]
    for name in ("train", "val"):
        split = manifest["splits"][name]
        dropped = ", ".join(f"{n} {reason}" for reason, n in split["dropped"].items())
        lines.append(
            f"  {name}: {split['pairs']} pairs of {split['lines']} lines, "
            f"{split['source_tokens']} + {split['target_tokens']} tokens; "
            f"dropped: {dropped or 'none'}"
        )
    test = manifest["splits"]["test"]
    lines.append(f"  test: {test['pairs']} pairs, {test['empty_sources']} of them empty")
    if manifest["train_sources_in_test"]:
        lines.append(f"  {manifest['train_sources_in_test']} training sources are in the test set")
    return "\n".join([*lines, *(f"  note: {note}" for note in manifest["notes"])])


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="prepare", description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--corpus", help="multi30k, wmt14-ende, wmt14-enfr, iwslt14, catalogs, files:DIR"
    )
    for split in ("train", "val", "test"):
        parser.add_argument(
            f"--{split}",
            nargs=2,
            type=Path,
            metavar=("SOURCE", "TARGET"),
            help="two aligned text files, instead of --corpus",
        )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--source", default="en", help="language code (default: en)")
    parser.add_argument("--target", default="de", help="language code (default: de)")
    parser.add_argument("--vocab-size", type=int, default=8000, help="subwords of both languages")
    parser.add_argument(
        "--max-length",
        type=int,
        default=256,
        help="tokens of a training sentence, EOS counted (default: 256)",
    )
    parser.add_argument(
        "--character-coverage", type=float, help="default: 1, or 0.9995 beyond a million pairs"
    )
    parser.add_argument("--keep-duplicates", action="store_true")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder --out")
    parser.add_argument("--cache", type=Path, help="downloads (default: ~/.cache/fastattn)")
    return parser


def _corpus(options: argparse.Namespace) -> RawCorpus:
    files = [options.train, options.val, options.test]
    if options.corpus:
        if any(files):
            raise CorpusError("give either --corpus or --train, --val and --test, not both")
        return open_corpus(options.corpus, options.source, options.target, options.cache)
    if not all(files):
        raise CorpusError("give --corpus, or all of --train, --val and --test")
    splits = ([FilePair(*pair)] for pair in files)
    return RawCorpus("files", options.source, options.target, *splits)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        prepared = prepare(
            _corpus(options),
            options.out,
            vocab_size=options.vocab_size,
            max_length=options.max_length,
            character_coverage=options.character_coverage,
            keep_duplicates=options.keep_duplicates,
            overwrite=options.overwrite,
        )
    except (ValueError, OSError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    print(report(prepared.manifest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
