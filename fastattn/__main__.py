"""``python -m fastattn``: what is built, what was found, and which backend runs what."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from typing import Any, NoReturn

from fastattn import _status


class _ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, with one line on stderr for a wrong argument."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see --help)", file=sys.stderr)
        sys.exit(2)


def main(arguments: list[str] | None = None) -> int:
    parser = _ArgumentParser(prog="python -m fastattn", description=__doc__, allow_abbrev=False)
    parser.set_defaults(run=_print_status, json=False)
    commands = parser.add_subparsers(title="commands", metavar="command")
    status = commands.add_parser("status", help="print the status; so does no command at all")
    for each in (parser, status):
        each.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="as one JSON object"
        )
    _add_compile(commands)
    options = parser.parse_args(arguments)
    try:
        code = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, head for instance, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _print_status(options: argparse.Namespace) -> int:
    status = _status.collect()
    print(json.dumps(status, indent=2) if options.json else _status.render(status))
    return 0


def _add_compile(commands: Any) -> None:
    command = commands.add_parser(
        "compile", help="compile the CUDA kernels that usual calls need; no GPU is needed"
    )
    command.add_argument(
        "--arch", type=_architectures, required=True, metavar="sm_60,sm_75", help="for which cards"
    )
    command.add_argument(
        "--ops", type=lambda text: text.split(","), metavar="OP,OP", help="of which ops; else all"
    )
    command.add_argument(
        "--jobs", type=_positive, default=os.cpu_count(), metavar="N", help="kernels at a time"
    )
    command.set_defaults(run=_compile)


def _architectures(text: str) -> list[int]:
    names = text.split(",")
    for name in names:
        if not re.fullmatch(r"sm_\d{2,3}", name):
            raise argparse.ArgumentTypeError(f"{name!r} is no architecture such as sm_60")
    return [int(name[3:]) for name in names]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _compile(options: argparse.Namespace) -> int:
    from fastattn._cuda import ahead

    began, done, compiled = time.perf_counter(), 0, 0
    try:
        for kernel, arch, seconds in ahead.compile_sets(options.arch, options.ops, options.jobs):
            took = "kept" if seconds is None else f"{seconds:.2f} s"
            print(f"sm_{arch}  {took:>7}  {kernel.name}", flush=True)
            done, compiled = done + 1, compiled + (seconds is not None)
    except (RuntimeError, ValueError) as error:
        print(f"python -m fastattn compile: {error}", file=sys.stderr)
        return 2
    took = f"{time.perf_counter() - began:.1f} s"
    print(f"{done} kernels, {compiled} of them compiled now, in {took}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
