"""Prints what every Triton kernel costs on GPUs that need not be there: compiled, not run.

python -m benchmarks.triton_table [--arch sm_90 ...] [--case causal ...] [--dtype bfloat16 ...]
"""

from __future__ import annotations

import argparse
import sys

from fastattn.testing.triton_cases import ARCHS, DTYPES, cases, faults
from fastattn.testing.triton_offline import compile_launch

COLUMNS = f"{'case':<26} {'kernel':<24} {'GPU':<7} {'warps':>5} {'registers':>9} {'spilled':>7}"
COLUMNS += f" {'shared':>7}  tensor cores"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.triton_table", description=__doc__.split("\n")[0])
    names = sorted({case.name for case in cases()})
    dtypes = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=ARCHS)
    parser.add_argument("--case", nargs="+", choices=names, default=names)
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The number of kernels that a gate has something against, at most 1."""
    args, failed = parse_args(argv), 0
    print(COLUMNS)
    for case in cases():
        if case.name not in args.case or str(case.dtype).removeprefix("torch.") not in args.dtype:
            continue
        for arch in args.arch:
            for launch in case.launches(arch):
                found = compile_launch(launch, arch)
                words = " ".join(f"{name} {count}" for name, count in found.tensor.items())
                print(
                    f"{case.label:<26} {found.name.removesuffix('_kernel'):<24} {arch:<7} "
                    f"{found.warps:>5} {found.registers:>9} {found.spilled:>7} {found.shared:>7}  "
                    f"{words or '-'}",
                    flush=True,
                )
                for fault in faults(found, case.dtype, is_low=case.is_low):
                    failed += 1
                    print(f"    gate: {fault}")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
