"""The commands of :mod:`ptdbench.__main__`, a module each, and the arguments that several of them share."""

import argparse
from typing import Any


def add_options(parser: argparse.ArgumentParser, lists: str) -> None:
    """Declare what ``train`` takes, for a command that composes the same runs; ``lists`` says what lists mean to it."""
    overrides: Any = parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help=f"as for train; {lists}")
    overrides.completer = _complete  # which argcomplete calls
    parser.add_argument("--multirun", "-m", action="store_true", help="as for train; not needed for lists")
    parser.add_argument("--config-dir", "-cd", metavar="FOLDER", help="one more folder of configurations")
    parser.add_argument("--config-path", "-cp", metavar="FOLDER", help="the folder of configurations itself")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="the primary configuration")


def _complete(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    from ptdbench.setup import hydra_interface  # Hydra takes a second to import

    return hydra_interface.completions(prefix, parsed_args)
