"""SLURM's shorthand for many nodes: lists of host names, and of the number of tasks on each node."""

import re

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand(text: str) -> list[str]:
    """Return the names that ``gpu[01-03,7]-ib,login`` stands for, in order; of several brackets the last is fastest.

    By submitit, as ``scontrol show hostnames`` is one more process for every rank, and often missing in a job's
    container.

    Raises:
        ValueError: The brackets do not match, or a range is malformed.
    """
    from submitit.slurm.slurm import SlurmParseException, _parse_node_list  # only some ranks need it

    try:
        return [host for host in _parse_node_list(text) if host]
    except SlurmParseException:
        raise ValueError(f"{text!r} is not a list of hosts such as gpu[01-03,7],login") from None


def tasks_per_node(text: str) -> list[int]:
    """Parse the number of tasks of each node, ``2(x3),1`` as ``[2, 2, 2, 1]``; raises ValueError if malformed."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if not match:
            raise ValueError(f"{text!r} is not a list of tasks per node such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
