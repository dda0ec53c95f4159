"""``ptdbench train`` called from Python, for notebooks and programs."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from hydra.core.global_hydra import GlobalHydra

from ptdbench import entry
from ptdbench.launch import local
from ptdbench.problems import ConfigError
from ptdbench.records import load, store
from ptdbench.run import launched
from ptdbench.setup import commandline


class TrainError(RuntimeError):
    """What stopped :func:`ptdbench.train`; the message is the one that a terminal would show."""


def train(words: Sequence[str]) -> load.Run | load.Runs:
    """Execute ``ptdbench train`` with these words in this process, and return the records.

    The output directory and what is printed are the same. A list of values needs no ``-m``. A run that fails is
    a record, not an exception. In a process that torchrun, srun or mpirun has started, or with ``cluster=env``, all
    ranks call this function, and each one takes part.

    Args:
        words: The words that would follow ``ptdbench train``, such as ``["model=gpt_tiny", "parallel=ddp,fsdp"]``.

    Returns:
        As :func:`ptdbench.load`: one record for a run, a list of runs for a sweep, whose ``frame()`` is a pandas
        DataFrame. An empty list if the words only show something, such as ``--help``.

    Raises:
        TrainError: The words are invalid, in which case nothing has started; a run cannot be written; or this process
            is a rank, and a run failed here.
        KeyboardInterrupt: Ctrl-C. What has ended is on record.
    """
    if isinstance(words, str):
        raise TypeError(f"words must be a list of strings, not a string: try {words.split()}")
    _check_process(words)
    arrived = None
    with _as_program(words):
        launched.begin()
        try:
            entry.set_up()
            with local.deferred():  # an interrupted import of torch could not be repeated in this process
                from ptdbench.run import door  # noqa: F401
            with local.stopping():
                arguments = commandline.parse()
                arguments.multirun |= commandline.has_list(arguments.overrides) and not arguments.run
                _, directory = entry.execute(arguments)
                return load.load(directory) if directory else load.Runs()
        except (ConfigError, store.Damaged, FileNotFoundError) as error:
            launched.dismiss(error if isinstance(error, ConfigError) else ConfigError([]))
            raise TrainError(str(error)) from error
        except SystemExit as error:
            raise TrainError("the run failed in this process; the reason is printed above, and on record") from error
        except local.Stopped as stop:
            arrived = stop
    signal.raise_signal(arrived.signal)  # has the effect that it has outside of this call
    raise KeyboardInterrupt(str(arrived))


def _check_process(words: Sequence[str]) -> None:
    """Raise TrainError if this process cannot handle signals in this thread, or has process groups already.

    Ranks of ``cluster=env`` need no signals: their launcher stops them.
    """
    if threading.current_thread() is not threading.main_thread() and "cluster=env" not in words:
        raise TrainError("ptdbench.train must be called from the main thread, the only one that receives Ctrl-C")
    groups = sys.modules.get("torch.distributed")
    if groups and groups.is_available() and groups.is_initialized():
        reason = "torch.distributed is initialized, and runs have process groups of their own"
        raise TrainError(f"{reason}: call torch.distributed.destroy_process_group() first")


@contextmanager
def _as_program(words: Sequence[str]) -> Iterator[None]:
    """Within the context, be the program ``python -m ptdbench train``; afterwards, this process is as it was.

    Processes of :mod:`multiprocessing` would import the caller's ``__main__``, and train again: they get an empty one.
    """
    argv, main, path, environ = sys.argv, sys.modules["__main__"], [*sys.path], {**os.environ}
    of_hydra, hydra = GlobalHydra.instance(), GlobalHydra.instance().hydra
    sys.argv = [str(Path(__file__).with_name("__main__.py")), *words]
    sys.modules["__main__"] = ModuleType("__main__")
    of_hydra.hydra = None
    try:
        yield
    finally:
        sys.argv, sys.modules["__main__"], sys.path[:], of_hydra.hydra = argv, main, path, hydra
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
        store.unlock_all()
