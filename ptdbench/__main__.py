"""``ptdbench COMMAND``, also ``python -m ptdbench COMMAND``; each module of :mod:`ptdbench.commands` is one.

A command has ``HELP``, ``add_arguments(parser)`` and ``main(arguments)``, which returns the exit status; for unusable
input that is 1, or its ``UNUSABLE``; with ``TAKES_PROGRAM``, ``arguments.program`` has what follows ``--``. It imports
what it needs when it runs, so that ``--help`` answers at once.
``train`` is not one of them: Hydra reads what follows it.
"""

import os
import sys

# Commands may read another user's files: python -m would import modules from the folder that holds them. Commands that
# import a user's modules add the folder after Python's own.
if __name__ == "__main__":
    try:
        current = os.getcwd()
    except FileNotFoundError:  # it was deleted
        current = ""
    if sys.path[0] == current:
        del sys.path[0]

import signal

# While modules are imported, Ctrl-C ends a program without a traceback, unless it is ignored as in the background.
if "ptdbench" in (os.path.basename(sys.argv[0]), __package__ if __name__ == "__main__" else "") and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
from importlib import import_module
from pkgutil import iter_modules
from typing import NoReturn

from ptdbench import commands
from ptdbench.problems import ConfigError, meant
from ptdbench.terminal import echo


def main() -> int:
    """Execute the command line; return exit status 0 for success, 1 for a failure or a run that was not ok."""
    if sys.argv[1:2] == ["train"]:
        from ptdbench import entry

        del sys.argv[1]
        entry.main()
    parser, of_commands = _parsers()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    if of_command := of_commands.get(next(iter(sys.argv[1:]), "")):
        words, program = sys.argv[2:], []  # in any order, unless a -- keeps what follows it from being options
        if of_command.get_default("takes_program") and "--" in words:
            words, program = words[: words.index("--")], words[words.index("--") + 1 :]
        arguments = of_command.parse_args(words) if "--" in words else of_command.parse_intermixed_args(words)
        arguments.program = program
        from ptdbench.records.store import Damaged

        try:
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # from now on there may be something to clean up
                signal.signal(signal.SIGINT, signal.default_int_handler)
            return int(arguments.main(arguments))
        except KeyboardInterrupt:
            return 130
        except (ConfigError, Damaged) as refusal:
            echo(str(refusal), sys.stderr)
        except OSError as error:
            echo(f"{error.filename}: {error.strerror}" if error.filename else str(error), sys.stderr)  # read or written
        return int(arguments.unusable)
    if parser.parse_args().version:
        from ptdbench.measure import hardware

        echo(hardware.this_package())
    else:
        parser.print_help()
    return 0


class _Parser(argparse.ArgumentParser):
    """A parser that says what may have been meant."""

    def error(self, message: str) -> NoReturn:
        """Exit with a message."""
        refusal = meant(message, self._option_string_actions, sys.argv[1:])
        is_program = self.get_default("takes_program") and "--" not in sys.argv and "unrecognized" in message
        super().error(f"{refusal}; put -- before a program" if is_program else refusal)


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the whole command line, and each command's parser."""
    program = "python -m ptdbench" if sys.argv[0].endswith("__main__.py") else "ptdbench"
    about = "Which way of parallelizing a PyTorch model is fastest on this machine or cluster?"
    tab = 'Completion by Tab: eval "$(register-python-argcomplete ptdbench)"'
    parser = _Parser(prog=program, description=about, epilog=tab)
    parser.add_argument("--version", action="store_true", help="print the version, and in a checkout the commit")
    choices = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    train = choices.add_parser("train", help="one run, or a sweep with -m, as python train.py: see train --help")
    commands.add_options(train, "lists need -m")  # for completion
    of_commands: dict[str, argparse.ArgumentParser] = {}
    for name in sorted(module.name for module in iter_modules(commands.__path__)):
        command = import_module(f"{commands.__name__}.{name}")
        about = (command.__doc__ or "").replace("``", "")
        of_commands[name] = choices.add_parser(name, help=command.HELP, description=about)
        command.add_arguments(of_commands[name])
        takes_program = getattr(command, "TAKES_PROGRAM", False)
        unusable = getattr(command, "UNUSABLE", 1)
        of_commands[name].set_defaults(main=command.main, unusable=unusable, takes_program=takes_program)
    return parser, of_commands


if __name__ == "__main__":
    sys.exit(main())
