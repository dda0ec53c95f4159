"""``python -m ptdbench COMMAND``; each module of :mod:`ptdbench.commands` is one.

A command has ``HELP``, ``add_arguments(parser)`` and ``main(arguments)``, which returns the exit status. It imports
what it needs when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pkgutil import iter_modules

from ptdbench import commands
from ptdbench.problems import ConfigError
from ptdbench.terminal import say


def main() -> int:
    """Exit status 0: it worked. 1: it could not be done, or a run of the sweep was not ok."""
    parser = argparse.ArgumentParser(prog="python -m ptdbench", description="Everything but the runs: see train.py.")
    choices = parser.add_subparsers(dest="command", required=True)
    for name in sorted(module.name for module in iter_modules(commands.__path__)):
        command = import_module(f"{commands.__name__}.{name}")
        own = choices.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_arguments(own)
        own.set_defaults(main=command.main)
    arguments = parser.parse_args()
    try:
        return int(arguments.main(arguments))
    except ConfigError as error:
        say(str(error), sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
