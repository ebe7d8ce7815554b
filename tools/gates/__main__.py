"""Prints the table of the CUDA kernels' static gates; exits 1 if one fails."""

from __future__ import annotations

import argparse
import datetime
import sys

from fastattn._cuda import nvrtc
from tools.gates.banks import CASES, conflicts
from tools.gates.gates import GATES
from tools.gates.table import HEAD, faults, line, measure


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gates", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="lines whose label holds TEXT")
    parser.add_argument("--arch", type=int, metavar="60", help="lines of one architecture")
    parser.add_argument("--banks", action="store_true", help="count bank conflicts as well")
    options = parser.parse_args()
    chosen = [
        gate for gate in GATES if options.only in gate.label and options.arch in (None, gate.arch)
    ]
    if not chosen:
        parser.error(f"no line holds {options.only!r}")
    print(f"{datetime.date.today()}, {nvrtc.describe(nvrtc.choose(chosen[0].arch)[0])}")
    print(HEAD)
    failed = 0
    for gate in chosen:
        found = measure(gate)
        failed += bool(faults(gate, found))
        print(line(gate, found), flush=True)
    print(f"{len(chosen)} kernels, {failed} of them beyond their limits")
    failed += _print_banks() if options.banks else 0
    return 1 if failed else 0


def _print_banks() -> int:
    """Wavefronts of shared memory on emulated threads; how many kernels have conflicts."""
    failed = 0
    print(f"\n{'shared memory':<75} {'wavefronts':>10} {'conflicts':>9}")
    for case in CASES:
        for kernel, wavefronts, needed in conflicts(case):
            print(f"{kernel:<75} {wavefronts:>10} {wavefronts - needed:>9}", flush=True)
            failed += wavefronts > needed
    return failed


if __name__ == "__main__":
    sys.exit(main())
