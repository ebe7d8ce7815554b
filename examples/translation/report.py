"""The tables of measured runs in the READMEs, made from results/*.json.

    python -m examples.translation.report           prints the table
    python -m examples.translation.report --write   puts it into the READMEs

A result file is the `result.json` of a run, copied to results/ under a name of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
READMES = (HERE / "README.md", HERE.parent.parent / "README.md")
BEGIN = "<!-- measured: made by python -m examples.translation.report -->"
END = "<!-- /measured -->"


def table(results: Mapping[str, dict]) -> str:
    """A row a run by its name, least training first, and beneath it what they have in common."""
    lines = [
        "| run | corpus | parameters | minutes | threads | target tokens/s | epochs "
        "| sacreBLEU 13a | chrF | length ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, result in sorted(results.items(), key=lambda run: run[1]["target_tokens"]):
        scores = result["scores"]
        lines.append(
            f"| {name} | {result['corpus'].removeprefix('files:')} {result['languages']} "
            f"| {result['parameters'] / 1e6:.1f}M | {result['train_seconds'] / 60:.0f} "
            f"| {result['threads']} | {result['target_tokens_per_second']:,.0f} "
            f"| {result['epochs']:.1f} | {result['sacrebleu_13a']:.1f} | {scores['chrf']:.1f} "
            f"| {scores['length_ratio']:.3f} |"
        )
    first = next(iter(results.values()))
    machine = first["machine"]
    lines += [
        "",
        f"{machine['processor']}, torch {machine['torch']}; test set {first['test_files'][0]}; "
        f"signature `{first['signature']}`.",
    ]
    return "\n".join(lines)


def load_results() -> dict[str, dict]:
    """By the file's name without its ending."""
    paths = sorted(HERE.glob("results/*.json"))
    return {path.stem: json.loads(path.read_text("utf-8")) for path in paths}


def with_table(text: str, measured: str) -> str:
    """`text` with what stands between the two marks replaced by `measured`."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no block from {BEGIN} to {END}")
    return f"{before}{BEGIN}\n{measured}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="report", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the table into the READMEs")
    options = parser.parse_args(arguments)
    measured = table(load_results())
    print(measured)
    if options.write:
        for path in READMES:
            path.write_text(with_table(path.read_text("utf-8"), measured), "utf-8")


if __name__ == "__main__":
    main()
