"""Ctrl-C while a program still imports: it ends without a traceback."""

import os
import signal

#: Exit status of a program that Ctrl-C has ended.
STATUS = 130


def _end(*_: object) -> None:
    os._exit(STATUS)


def end_on_interrupt() -> None:
    """From now on, end at once on Ctrl-C, unless it is ignored, as in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """From now on, raise KeyboardInterrupt again, as there may be something to clean up."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
