"""Tables and charts from result files: ``python -m benchmarks.report results/cpu.json``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

_HEADER = (
    "| case | peer | peer ms | ours ms | ratio, 1 thread | ratio, all threads | reach | of limit |"
)


def markdown_table(rows: list[dict]) -> str:
    """One line a row; a ratio is the peer's time over ours, so above 1 ours is faster."""
    lines = [_HEADER, "|---|---|---:|---:|---:|---:|---:|---|"]
    for row in rows:
        fraction = row["limit_fraction"]
        limit = f"{fraction:.0%} of {row['limit']}" if fraction else ""
        lines.append(
            f"| {row['name']} | {row['peer']} | {row['peer_ms']:.3f} | {row['ours_ms']:.3f} "
            f"| {row['ratio']:.2f} | {row['wall_ratio']:.2f} | {row['reach']:.2f} | {limit} |"
        )
    return "\n".join(lines)


def draw_chart(result: dict, path: Path) -> None:
    """A bar a case: the peer's time over ours, one thread; a tick where the goal is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"][::-1]
    places = range(len(rows))
    figure, axes = pyplot.subplots(figsize=(9, 0.28 * len(rows) + 1.5), layout="constrained")
    colours = ["#2a7f62" if row["ratio"] >= 1 else "#b5483a" for row in rows]
    axes.barh(places, [row["ratio"] for row in rows], color=colours)
    axes.plot([row["reach"] for row in rows], places, "k|", markersize=9, label="goal")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(places, [row["name"] for row in rows], fontsize=8)
    axes.set_xlabel("torch's time / ours (above 1: ours is faster), 1 thread, CPU time")
    about = result["machine"]
    axes.set_title(
        f"{about['cpu']}, {about['isa']}, torch {about['torch']}, {about['date'][:10]}", fontsize=9
    )
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path, help="a file written by --results")
    parser.add_argument("--chart", type=Path, help="also draw a bar chart to this PNG")
    arguments = parser.parse_args()
    result = json.loads(arguments.results.read_text())
    about = result["machine"]
    print(", ".join(f"{key} {value}" for key, value in about.items()) + "\n")
    print(markdown_table(result["rows"]))
    if arguments.chart:
        draw_chart(result, arguments.chart)


if __name__ == "__main__":
    main()
