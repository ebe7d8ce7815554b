"""``python -m fastattn``: what is built, what was found, and which backend runs what."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import NoReturn

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


if __name__ == "__main__":
    sys.exit(main())
