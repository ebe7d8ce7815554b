"""Tables and charts of the result files, in README.md, docs/benchmarks.md and benchmarks/plots.

    python -m benchmarks.report             of every file in benchmarks/results
    python -m benchmarks.report FILE ...    of these files alone
    python -m benchmarks.report --print     only prints the tables

A result file is what `pytest benchmarks/ --benchmark-only` writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
DOCS = HERE.parent / "docs" / "benchmarks.md"
PLOTS = HERE / "plots"
BEGIN = "<!-- benchmarks: made by python -m benchmarks.report -->"
END = "<!-- /benchmarks -->"
NOTHING = "`make bench` measures; there is no result file yet."


def markdown_table(rows: Sequence[dict]) -> str:
    """One line a row; a ratio is the peer's time over ours, so above 1 ours is faster."""
    lines = [
        "| case | peer | buffers | peer ms | ours ms | ratio, 1 thread | ratio, all threads "
        "| to reach | of the limit |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        lines.append(
            f"| {_case(row)} | {row['peer']} | {row['buffers']} | {row['peer_ms']:.3f} "
            f"| {row['ours_ms']:.3f} | {_ratio(row['ratio'])} | {_ratio(row['wall_ratio'])} "
            f"| {_reach(row)} | {_limit(row)} |"
        )
    return "\n".join(lines)


def summary_table(rows: Sequence[dict]) -> str:
    """One line a kind of case: the spread of the ratios and how many reach their goal."""
    lines = [
        "| torch's time / ours | cases | least | median | most | median, all threads "
        "| reach their goal |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for group in dict.fromkeys(_group(row) for row in rows):
        of_group = [row for row in rows if _group(row) == group]
        ratios = [row["ratio"] for row in of_group]
        walls = [row["wall_ratio"] for row in of_group]
        figures = (min(ratios), statistics.median(ratios), max(ratios), statistics.median(walls))
        goals = [row for row in of_group if row["reach"]]
        lines.append(
            f"| {group} | {len(of_group)} | {' | '.join(map(_ratio, figures))} "
            f"| {sum(map(reached, goals))} of {len(goals)} |"
        )
    return "\n".join(lines)


def one_line(row: dict) -> str:
    goal = f", to reach {_reach(row)}" if row["reach"] else ""
    return (
        f"{_case(row)} ({row['peer']}, {row['buffers']} buffers): {row['ratio']:.2f}, "
        f"all threads {row['wall_ratio']:.2f}{goal}; {_limit(row)}"
    )


def reached(row: dict) -> bool:
    """Whether both ways of measuring find the ratio to reach, to two decimals."""
    return round(min(row["ratio"], row["wall_ratio"]), 2) >= row["reach"]


def about(result: dict) -> str:
    """One paragraph: machine, versions, how quiet it was, what the columns mean."""
    machine, run = result["machine"], result["run"]
    busy = "**The machine was busy.** " if run["busy"] else ""
    pages = "on" if machine["huge_pages"] else "off"
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}; torch {machine['torch']} "
        f"(huge pages {pages}), Python {machine['python']}, fastattn {machine['fastattn']} at "
        f"{machine['commit']}; {machine['date'][:10]}, {run['minutes']:.0f} minutes. {busy}"
        f"Load average {run['load_at_start']:.2f} at the start, {run['load_at_end']:.2f} at the "
        f"end; other programs used {run['cores_used_by_others']:.2f} cores. Times are of one "
        f"thread (CPU time); the ratio over all {machine['threads']} threads is of wall time."
    )


def sections(results: dict[str, dict]) -> str:
    """What docs/benchmarks.md says of the result files, each by its name."""
    if not results:
        return NOTHING
    return "\n\n".join(
        f"## {name}\n\n{about(result)}\n\n![ratios](../benchmarks/plots/{name}.png)\n\n"
        f"{markdown_table(result['rows'])}"
        for name, result in results.items()
    )


def summary(results: dict[str, dict]) -> str:
    """What README.md says of the result files: the short tables of those that are not long runs."""
    short = {name: r for name, r in results.items() if not name.endswith("-long")}
    if not short:
        return NOTHING
    return "\n\n".join(
        f"{summary_table(result['rows'])}\n\n{about(result)}" for result in short.values()
    )


def with_block(text: str, measured: str) -> str:
    """``text`` with what stands between the two marks replaced by ``measured``."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no block from {BEGIN} to {END}")
    return f"{before}{BEGIN}\n{measured}\n{END}{after}"


def load_results(paths: Sequence[Path] = ()) -> dict[str, dict]:
    """By the file's name without its ending; with no ``paths`` those of benchmarks/results."""
    return {
        path.stem: json.loads(path.read_text("utf-8"))
        for path in paths or sorted(HERE.glob("results/*.json"))
    }


def draw_chart(result: dict, path: Path) -> None:
    """Two bars a case, the peer's time over ours on one thread and on all; a tick at the goal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if row["buffers"] in ("usual", "reused")][::-1]
    rows = [row for row in rows if not row["peer"].endswith("compiled")]
    figure, axes = pyplot.subplots(figsize=(10, 0.36 * len(rows) + 1.5), layout="constrained")
    for shift, key, colour, label in (
        (0.2, "ratio", "#2a7f62", "1 thread, CPU time"),
        (-0.2, "wall_ratio", "#8fc1ae", f"{result['machine']['threads']} threads, wall time"),
    ):
        places = [place + shift for place in range(len(rows))]
        axes.barh(places, [row[key] for row in rows], height=0.38, color=colour, label=label)
    goals = [(row["reach"], place) for place, row in enumerate(rows) if row["reach"]]
    axes.scatter(*zip(*goals, strict=True), s=160, marker="|", color="black", label="to reach")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [_bar_label(row) for row in rows], fontsize=8)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlabel("torch's time / ours: above 1, ours is faster")
    machine = result["machine"]
    axes.set_title(
        f"{machine['cpu']}, {machine['isa']}, torch {machine['torch']}, {machine['date'][:10]}",
        fontsize=9,
    )
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def _group(row: dict) -> str:
    return row["name"].split(":")[0]


def _case(row: dict) -> str:
    if "memory_ratio" not in row:
        return row["name"]
    return (
        f"{row['name']} (extra memory {row['memory_ratio']:.1f} times less, to reach "
        f"{row['memory_reach']:.1f})"
    )


def _bar_label(row: dict) -> str:
    return row["name"] if row["buffers"] == "usual" else f"{row['name']} ({row['buffers']} buffers)"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"**{value:.2f}**"


def _reach(row: dict) -> str:
    if not row["reach"]:
        return ""
    return f"{row['reach']:.2f}" + ("" if reached(row) else ", missed")


def _limit(row: dict) -> str:
    parts = sorted(row["limit"].items(), key=lambda part: -part[1])
    names = " + ".join(
        name if len(parts) == 1 else f"{name} {share:.0%}" for name, share in parts if share > 0.005
    )
    return f"{row['limit_fraction']:.0%} of {names}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__.split("\n")[0]
    )
    parser.add_argument("results", type=Path, nargs="*", metavar="FILE")
    parser.add_argument("--print", action="store_true", help="print the tables and write nothing")
    options = parser.parse_args(arguments)
    if missing := [path for path in options.results if not path.is_file()]:
        parser.error(f"there is no file {missing[0]}")
    results = load_results(options.results)
    if options.print:
        print(sections(results))
        return
    PLOTS.mkdir(exist_ok=True)
    for name, result in results.items():
        draw_chart(result, PLOTS / f"{name}.png")
    DOCS.write_text(with_block(DOCS.read_text("utf-8"), sections(results)), "utf-8")
    README.write_text(with_block(README.read_text("utf-8"), summary(results)), "utf-8")


if __name__ == "__main__":
    main()
