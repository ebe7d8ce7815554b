"""Scores translations: BLEU and chrF by sacrebleu, with the signatures that say how.

    python -m examples.translation.score --hyp H --ref R --lang de [--json]

Both files are plain text as people write it, one sentence a line. Refused unless --force is given:
text that was tokenised or cut into subwords, where a side has
- a space before a comma or full stop in more than 10% of its lines,
- `&quot;`, `&apos;`, `@-@` and the like in more than 2%, or
- `@@ ` or `▁` in more than 1%.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from sacrebleu.metrics import BLEU, CHRF

from examples.translation.cli import ArgumentParser
from examples.translation.lines import read_lines

# What a tokeniser leaves behind, and the share of lines that is too much.
_TOKENISED = (
    ("a space before a comma or full stop", re.compile(r"\s[.,](?=\s|$)"), 0.10),
    ("escapes such as &quot; or @-@", re.compile(r"&(?:quot|apos|#91|#93|#124|lt|gt);|@-@"), 0.02),
    ("subword marks (@@ or ▁)", re.compile(r"@@ |▁"), 0.01),
)
_MARKUP = re.compile(r"\s*<(?:\?xml|!doctype|refset|srcset|tstset|mteval)", re.IGNORECASE)
_NO_WORD_SPACES = ("ja", "th", "zh")


class ScoreError(ValueError):
    """Text that can't be scored, in one sentence."""


def score(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    lang: str,
    *,
    force: bool = False,
) -> dict:
    """Scores of detokenised `hypotheses`, line i against line i of each list in `references`.

    Returns sacrebleu_13a, sacrebleu_intl, chrf (0 to 100), length_ratio (13a tokens of the
    hypotheses over those of the reference), signatures, lang, sentences and warnings.
    Raises ScoreError where counts differ, references are nested by sentence, or (without `force`)
    a side looks tokenised.
    """
    _check_counts(hypotheses, references)
    warnings = []
    sides = {"the hypotheses": hypotheses}
    sides |= {f"reference {n}": lines for n, lines in enumerate(references, start=1)}
    for side, lines in sides.items():
        found = why_tokenised(lines)
        if found and not force:
            raise ScoreError(f"{side} look tokenised: {found}; detokenise, or give --force")
        if found:
            warnings.append(f"{side} look tokenised: {found}")
    if lang in _NO_WORD_SPACES:
        warnings.append(f"13a and intl cut no words in {lang!r}: trust chrF alone")
    metrics = {
        "sacrebleu_13a": BLEU(tokenize="13a", force=True),
        "sacrebleu_intl": BLEU(tokenize="intl", force=True),
        "chrf": CHRF(),
    }
    results = {
        name: metric.corpus_score(list(hypotheses), [list(lines) for lines in references])
        for name, metric in metrics.items()
    }
    ratio = results["sacrebleu_13a"].ratio
    if not 0.9 <= ratio <= 1.1:
        warnings.append(f"length ratio {ratio:.3f} is outside 0.9 to 1.1")
    return {
        **{name: round(result.score, 4) for name, result in results.items()},
        "length_ratio": round(ratio, 4),
        "signatures": {name: str(metric.get_signature()) for name, metric in metrics.items()},
        "lang": lang,
        "sentences": len(hypotheses),
        "warnings": warnings,
    }


def why_tokenised(lines: Sequence[str]) -> str | None:
    """What makes `lines` look tokenised, or None."""
    for what, pattern, limit in _TOKENISED:
        found = sum(pattern.search(line) is not None for line in lines)
        if found > limit * len(lines):
            return f"{what} in {found} of {len(lines)} lines (more than {limit:.0%})"
    return None


def read_text(path: str | Path) -> list[str]:
    """Lines of a plain text file; only ``\\n`` ends one.

    Raises ScoreError for an SGML or XML file, whose markup would be scored as words.
    """
    lines = read_lines(path)
    marked_up = lines and _MARKUP.match(lines[0])
    if marked_up or re.search(r"\.(sgml?|xml)(\.gz|\.xz)?$", str(path), re.IGNORECASE):
        raise ScoreError(f"{path} is SGML or XML: extract its text first, one segment a line")
    return lines


def _check_counts(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if not references or isinstance(references, str) or isinstance(references[0], str):
        raise ScoreError("references must be a list of lists of lines, one list a reference file")
    if not hypotheses:
        raise ScoreError("there are no hypotheses to score")
    for number, lines in enumerate(references, start=1):
        if len(lines) == len(hypotheses):
            continue
        message = f"{len(hypotheses)} hypotheses, but reference {number} has {len(lines)} lines"
        if len(references) == len(hypotheses):
            message += ": references are nested by sentence, give one list a reference file"
        raise ScoreError(message)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="score", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--hyp", required=True, type=Path, help="translations, detokenised")
    parser.add_argument("--ref", required=True, type=Path, nargs="+", help="one or more references")
    parser.add_argument("--lang", required=True, help="language of both, as in de")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--force", action="store_true", help="score tokenised text all the same")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        hypotheses = read_text(options.hyp)
        references = [read_text(path) for path in options.ref]
        for path, lines in zip(options.ref, references, strict=True):
            if len(lines) != len(hypotheses):
                raise ScoreError(
                    f"{options.hyp} has {len(hypotheses)} lines, but {path} has {len(lines)}"
                )
        scores = score(hypotheses, references, options.lang, force=options.force)
    except (ValueError, OSError) as error:
        print(f"score: {error}", file=sys.stderr)
        return 2
    for warning in scores["warnings"]:
        print(f"score: warning: {warning}", file=sys.stderr)
    print(json.dumps(scores, ensure_ascii=False) if options.json else table(scores))
    return 0


def table(scores: dict) -> str:
    """The scores for people, each with its signature."""
    names = {"sacrebleu_13a": "BLEU 13a", "sacrebleu_intl": "BLEU intl", "chrf": "chrF"}
    lines = [
        f"{title:<10} {scores[name]:6.2f}   {scores['signatures'][name]}"
        for name, title in names.items()
    ]
    return "\n".join([*lines, f"{'length':<10} {scores['length_ratio']:6.3f}   of the reference"])


if __name__ == "__main__":
    sys.exit(main())
