"""Hydra's own options: what is refused since it would do nothing here, and the launchers that there are."""

from __future__ import annotations

import pytest

from ptdbench.problems import ConfigError
from ptdbench.setup import config, hydra_options
from ptdbench.setup.compose import compose_all


def refused(*overrides: str) -> str:
    composed = compose_all(["model=toy", *overrides])
    with pytest.raises(ConfigError) as found:
        hydra_options.check(composed, config.read(composed.jobs[0]).cluster, None, None)
    return str(found.value)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("hydra.job.chdir=true", "hydra.job.chdir=true: runs start in the current directory; omit it"),
        ("hydra.verbose=true", "hydra.verbose=true: nothing is logged through Hydra; omit it"),
        ("hydra.verbose=ptdbench", "hydra.verbose=ptdbench: nothing is logged through Hydra; omit it"),
        ("hydra/job_logging=default", "hydra.job_logging={...}: nothing is logged through Hydra; omit it"),
        ("hydra/hydra_logging=default", "hydra.hydra_logging={...}: nothing is logged through Hydra; omit it"),
        (
            "+hydra.callbacks.mine={_target_:my.Callback}",
            "hydra.callbacks={...}: nothing of Hydra's runs a job, and would call them; omit them",
        ),
        (
            "hydra/launcher=ptdbench",
            "hydra/launcher=ptdbench: runs are started by ptdbench; try basic, submitit_local, submitit_slurm",
        ),
    ],
)
def test_what_would_do_nothing(typed, told):
    assert refused(typed) == told


def test_what_is_typed_as_it_is_by_default():
    composed = compose_all(["model=toy", "hydra.job.chdir=false", "hydra.verbose=false", "hydra/job_logging=none"])
    hydra_options.check(composed, config.read(composed.jobs[0]).cluster, None, None)
