"""Sweeps whose runs one of Hydra's sweepers chooses, each by the results of the earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf.errors import OmegaConfBaseException

from hydra_plugins import ptdbench_launcher
from ptdbench.problems import ConfigError, Problem
from ptdbench.records import objective, store
from ptdbench.setup import hydra_options, hydra_output
from ptdbench.setup.commandline import LAUNCHER, SWEEPER, quoted
from ptdbench.setup.compose import Composed
from ptdbench.sweep import carriers, requests
from ptdbench.sweep.agenda import Agenda


class NoObjective(Exception):
    """A run of a search that came to nothing."""


def search(agenda: Agenda, composed: Composed) -> None:
    """Let the sweeper choose runs until it has done; each of its batches is carried out, and it is told the objectives.

    Raises:
        ConfigError: The sweeper failed, or a run that it chose cannot be composed or submitted.
    """
    carry = carriers.carrier(agenda, composed)
    with composed.source.open():
        loader = GlobalHydra.instance().config_loader()
        own = [
            f"{LAUNCHER}={ptdbench_launcher.NAME}",
            f"hydra.sweep.dir={quoted(str(agenda.directory))}",
            *hydra_options.search_overrides(composed),
        ]
        sweep = composed.sweep(instead=own)
        hydra_output.write_multirun(sweep, agenda.directory)

        def carry_out(job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
            for words in job_overrides:
                try:
                    whole = loader.load_sweep_config(sweep, list(words))
                except (HydraException, OmegaConfBaseException) as error:
                    reason = str(error).partition("\n")[0]
                    raise ConfigError([Problem("command line", " ".join(words), reason)]) from None
                agenda.requests.append(requests.of_search(whole, words))
            numbers = range(first, first + len(job_overrides))
            carry(carriers.opened(agenda, numbers))
            return [_outcome(agenda, number) for number in numbers]

        Plugins.instance().register(ptdbench_launcher.HandOver)
        try:
            context = HydraContext(loader, None)  # type: ignore[arg-type]  # nothing of Hydra's calls back
            sweeper = Plugins.instance().instantiate_sweeper(
                config=sweep,
                hydra_context=context,
                task_function=carry_out,  # type: ignore[arg-type]
            )
            sweeper.sweep(arguments=list(sweep.hydra.overrides.task))
        except (ConfigError, OSError):
            raise
        except Exception as error:
            name = composed.first.hydra.runtime.choices[SWEEPER]
            raise ConfigError([Problem(SWEEPER, name, f"ended early: {' '.join(str(error).split())}")]) from error


def _outcome(agenda: Agenda, number: int) -> JobReturn:
    """Tell the sweeper the objective of a run's record, or why it has none."""
    words, directory = agenda.requests[number].overrides, agenda.directory / agenda.subdirectory(number)
    written = store.load_record(directory)
    wanted = written["config"]["objective"]
    if (value := objective.value(written, wanted)) is not None:
        return JobReturn(words, status=JobStatus.COMPLETED, _return_value=value)
    error = NoObjective(f"{directory.name}: {written['status']}, so that it has no {wanted}")
    return JobReturn(words, status=JobStatus.FAILED, _return_value=error)
