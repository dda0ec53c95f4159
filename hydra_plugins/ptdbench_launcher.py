"""The launcher that Hydra's sweepers are given for a search: it hands the runs they choose to ptdbench."""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher

#: The choice of ``hydra/launcher``.
NAME = "ptdbench"


class HandOver(Launcher):
    """Calls what it is given as the task with each batch of runs, and with the number of its first."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Remember the task."""
        self._carry_out = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Carry out a batch."""
        found: Sequence[JobReturn] = self._carry_out(job_overrides, initial_job_idx)
        return found


ConfigStore.instance().store(group="hydra/launcher", name=NAME, node={"_target_": f"{__name__}.HandOver"})
