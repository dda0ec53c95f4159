"""Completion of the options of a command line, which Hydra knows; argcomplete asks for them on behalf of a shell."""

import argparse

from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.completion_plugin import DefaultCompletionPlugin

from ptdbench.setup import compose


def options(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return what a word that begins with ``prefix`` may become, after the overrides typed before it.

    The last value of a list is completed: ``parallel=ddp,fs`` becomes ``parallel=ddp,fsdp``.
    """
    name, equals, value = prefix.partition("=")
    *earlier, last = value.split(",")
    line = " ".join(["-m", *parsed_args.overrides, f"{name}{equals}{last}"])
    source = compose.source(parsed_args)
    with source.open():
        plugin = DefaultCompletionPlugin(GlobalHydra.instance().config_loader())
        words = plugin._query(source.name, line)
    return [f"{name}={','.join([*earlier, word.partition('=')[2]])}" for word in words] if earlier else words
