"""Repeats: each run of a sweep once in every block, in an order in which no run is favoured."""

from __future__ import annotations

import random

from ptdbench.launch.world import World
from ptdbench.problems import Problem, require
from ptdbench.setup.commandline import SWEEPER
from ptdbench.setup.compose import Composed
from ptdbench.setup.config import Cluster, Repeat, Slurm, read
from ptdbench.terminal import command


def check(composed: Composed, cluster: Cluster, world: World | None) -> None:
    """Refuse repeats that differ within a sweep, or that cannot be had."""
    repeat = read(composed.jobs[0]).repeat
    runs = repeat.runs
    if any(read(job).repeat != repeat for job in composed.jobs[1:]):
        rule = "a sweep has one number of repeats, and one order"
        require(Problem("repeat.runs", runs, rule, "give one value, or start one sweep for each"))
    if runs == 1:
        return
    name, rule, remedy = "repeat.runs", "", ""
    if not composed.is_sweep:
        rule, remedy = "several runs are a sweep", f"add -m, as in {command()} -m repeat={runs}"
    elif composed.searches:
        sweeper = f"{SWEEPER}={composed.first.hydra.runtime.choices[SWEEPER]}"
        rule = f"{sweeper} chooses each run by the results of others, and repeats none"
        remedy = "omit it, and repeat the best runs in a sweep of their own"
    elif runs == "auto" and world and world.size > 1:
        rule = f"each of the {world.size} ranks that {world.launcher} started would decide by itself when to stop"
        remedy = "give a number, or start it with plain python"
    elif runs == "auto" and isinstance(cluster, Slurm) and cluster.submit == "detach":
        rule = "it needs the results of a block before it can submit the next one"
        name, remedy = "cluster.submit=detach with repeat.runs", "try cluster.submit=wait, or a number"
    if rule:
        require(Problem(name, runs, rule, remedy))


def order(alternatives: int, repeat: Repeat) -> list[tuple[int, int | None]]:
    """The runs of a sweep in the order in which they are carried out.

    Every block has each alternative once. The order within a block is random, and that of every second block is the
    reverse of the one before it (ABBA), so that a machine that gets steadily slower slows all alternatives alike.

    Args:
        alternatives: The number of combinations of the sweep's lists.
        repeat: How often each is run.

    Returns:
        The number of the alternative and of the block of each run; without repeats there is no block.
    """
    if repeat.runs == 1:
        return [(number, None) for number in range(alternatives)]
    found: list[tuple[int, int | None]] = []
    for block in range(repeat.max if repeat.runs == "auto" else repeat.runs):
        numbers = list(range(alternatives))
        random.Random(f"{repeat.seed} {block // 2}").shuffle(numbers)
        found += [(number, block) for number in (numbers if block % 2 == 0 else reversed(numbers))]
    return found
