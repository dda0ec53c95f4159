"""The workload ``check``: is this cluster sound? Short versions of the other measurements, and a verdict.

Whatever looks slow is measured again, on all ranks, before it is reported, and the best attempt counts: on a shared
machine anything may be slow once. If other load explains it, the cluster is not at fault: the verdict is ``busy``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from msgspec import to_builtins

from ptdbench.files import write_json
from ptdbench.job import Job, Outcome
from ptdbench.launch.collect import gather
from ptdbench.measure import ceiling, contention, diagnosis, gpu_state, memory
from ptdbench.measure.diagnosis import Finding
from ptdbench.measure.hardware import environment
from ptdbench.measure.other_load import OtherLoad
from ptdbench.measure.products import Shape
from ptdbench.problems import Problem, at_least, require
from ptdbench.report import workload_tables
from ptdbench.terminal import echo
from ptdbench.workloads import collectives, point_to_point
from ptdbench.workloads.collectives import Collectives
from ptdbench.workloads.hello import Hello
from ptdbench.workloads.point_to_point import PointToPoint

T = TypeVar("T", bound=Hashable)
Figures = dict[str, Any]

#: The rate of each device or link, and the key of the peers to compare it with.
Rates = tuple[dict[T, float], dict[T, Hashable]]

#: A machine-readable file, beside the record.
FILE = "check.json"

#: The matrix product by device type: large enough to be compute-bound, and short.
_SHAPES = {"cpu": Shape.of(1024), "cuda": Shape.of(8192)}
_DTYPES = ("fp32", "bf16")
_SECONDS = 0.5
_MESSAGE_BYTES = 2**24

#: Maximum seconds for the messages of a link: even at 3 MB/s it is measured, where others reach GB/s.
_LONGEST = 60.0
#: With more ranks, each sends only to the next one: the number of pairs grows quadratically.
_MOST_RANKS_IN_PAIRS = 8


_FEW_COLLECTIVES = Collectives(
    ops=["all_reduce", "all_gather", "broadcast"], min_bytes=2**10, max_bytes=2**20, factor=2**10, modes=["blocking"]
)


class Unsound(Exception):
    """The check found something wrong with this cluster."""


class Busy(Exception):
    """The check cannot tell whether this cluster is sound: other processes used it."""


@dataclass(frozen=True)
class Check:
    """Check the ranks and the links between them."""

    tolerance: float = 0.05  #: How far below the median of its peers a rank or link may be, as a fraction of it.
    attempts: int = 5  #: How often a suspicious rank or link is measured before it is reported.

    trains = False
    show = staticmethod(workload_tables.check_verdict)

    def __post_init__(self) -> None:
        """Raise ConfigError for options that are invalid on any cluster."""
        wrong = not 0 < self.tolerance < 1
        rule = "must lie between 0 and 1: a share of the median"
        require(
            Problem("tolerance", self.tolerance, rule, "0.05 is 5 %") if wrong else None,
            *at_least(1, attempts=self.attempts),
        )

    def check(self, world_size: int, device_type: str, backend: str) -> None:
        """Raise ConfigError for a backend that cannot send; a single rank without links is accepted."""
        if world_size > 1:
            PointToPoint().check(world_size, device_type, backend)

    def __call__(self, job: Job) -> Outcome:
        """Run one rank's part."""
        found = self.examine(job)
        errors = {"sound": None, "busy": Busy(_texts(found)), "unsound": Unsound(_texts(found))}
        return Outcome({"check": found}, error=errors[found["verdict"]])

    def examine(self, job: Job) -> Figures:
        """Measure and evaluate; every rank calls this and gets the same result. Rank 0 also writes a file.

        Raises:
            ArithmeticError: A sum, a product or a message is wrong, so that no result can be trusted.
        """
        hello = Hello()(job).fields["hello"]
        facts: list[Figures] = gather(_facts(job))
        load_so_far = contention.watch(job.device)
        products, slow_ranks, product_attempts = self._until_sound(
            lambda: self.products(job), partial(_product_rates, job)
        )
        product_load, load_so_far = load_so_far(), contention.watch(job.device)
        links, slow_links, link_attempts = self._until_sound(lambda: self.messages(job), partial(_link_rates, facts))
        link_load = load_so_far()
        together = collectives.measure(job, _FEW_COLLECTIVES) if job.world.size > 1 else None
        warm: list[Figures] = gather(_facts(job))  # now under heat and load
        findings = [
            *diagnosis.different_versions([of["environment"] for of in facts]),
            *_gpu_findings(job, facts, warm),
            *diagnosis.slow_ranks(slow_ranks, product_attempts, _loaded(facts, product_load)),
            *diagnosis.slow_links(slow_links, link_attempts, _loaded(facts, link_load)),
        ]
        verdict = diagnosis.verdict(findings)
        load = [  # the heavier load of each node
            max(of_node, key=lambda one: (len(one.gpu_ranks), one.taken or 0))
            for of_node in zip(product_load, link_load, strict=True)
        ]
        found = {
            "sound": verdict == "sound",
            "verdict": verdict,
            "busy": _why_busy(load) if verdict == "busy" else None,
            "findings": to_builtins(findings),
            "remarks": _remarks(job, facts, load),
            "tolerance": self.tolerance,
            "attempts": {"matmul": product_attempts, "p2p": link_attempts},
            "other_load": to_builtins({"matmul": product_load, "p2p": link_load}),
            "hello": hello,
            "versions": {name: facts[0]["environment"].get(name) for name in diagnosis.VERSIONS},
            "gpus": [of["gpu"] for of in warm],
            "links": {of["node"]: of["links"] for of in facts if of["links"]},
            "matmul": products,
            "p2p": links,
            "collectives": together,
        }
        if job.world.is_first:
            write_json(job.directory / FILE, found)
        return found

    def products(self, job: Job) -> Figures:
        """Measure the devices briefly."""
        shapes, alive = [_SHAPES[job.device.type]], job.watchdog.alive
        return ceiling.measure(job.world, job.device, shapes, _DTYPES, _SECONDS, copies=False, alive=alive)

    def messages(self, job: Job) -> Figures | None:
        """Measure the links briefly; ``None`` for a single rank."""
        if job.world.size == 1:
            return None
        pairs = "all" if job.world.size <= _MOST_RANKS_IN_PAIRS else "ring"
        size = {"min_bytes": _MESSAGE_BYTES, "max_bytes": _MESSAGE_BYTES}
        short = PointToPoint(pairs=pairs, **size, overlap_bytes=[], max_seconds=_LONGEST)
        return point_to_point.measure(job, short)

    def _until_sound(
        self, measure: Callable[[], Figures | None], read: Callable[[Figures], Rates[T]]
    ) -> tuple[Figures | None, dict[T, float], int]:
        """Measure until nothing looks slow or attempts run out; return first figures, what is slow, and attempts."""
        first, seen = measure(), []
        found, attempt = first, 1
        while found:
            rates, peers = read(found)
            seen.append(rates)
            slow = diagnosis.slow(diagnosis.best_of(seen), peers, self.tolerance)
            if not slow or attempt == self.attempts:
                return first, slow, attempt
            found, attempt = measure(), attempt + 1
        return first, {}, attempt


def preliminary(job: Job) -> Figures | None:
    """Run the check before a training run, or nothing without ``check=true``; rank 0 prints what is unsound."""
    if not job.spec.config.general.check:
        return None
    found = Check().examine(job)
    memory.release(job.device)
    job.watch.lap("check")
    if job.world.is_first and not found["sound"]:
        echo(f"{summary(found)}; the run continues", sys.stderr)
    return found


def with_check(outcome: Outcome, found: Figures | None) -> Outcome:
    """Add the findings of the preliminary check to a training run's outcome, with a remark if they are unsound."""
    if found is None:
        return outcome
    remarks = dict(outcome.fields["remarks"])
    if not found["sound"]:
        remarks["check"] = summary(found)
    return replace(outcome, fields={**outcome.fields, "check": found, "remarks": remarks})


def summary(found: Mapping[str, Any]) -> str:
    """Return the verdict and the findings in one line."""
    return f"{found['verdict']}: {_texts(found)}"


def _texts(found: Mapping[str, Any]) -> str:
    return "; ".join([*filter(None, [found["busy"]]), *(finding["text"] for finding in found["findings"])])


def _facts(job: Job) -> Figures:
    on_gpu = job.device.type == "cuda"
    seen = gpu_state.inspect() if on_gpu else {"gpus": [], "links": [], "reason": None}
    own = gpu_state.identity(job.device) if on_gpu else ""
    return {
        "environment": environment(job.device.type),
        "node": job.peers[job.world.rank].node,
        "gpu": next((gpu for gpu in seen["gpus"] if gpu["uuid"] == own), None),
        "seen": seen,
        "links": {"gpus": [gpu["uuid"] for gpu in seen["gpus"]], "matrix": seen["links"]} if seen["links"] else None,
        "reason": seen["reason"],
    }


def _product_rates(job: Job, found: Figures) -> Rates[tuple[str, int]]:
    """Return rates by dtype and rank; peers have the same device and number of threads."""
    rates = {(one["dtype"], of["rank"]): one["median"] for of in found["ranks"] for one in of["products"]}
    return rates, {
        (dtype, rank): (dtype, found["ranks"][rank]["device"], job.peers[rank].threads) for dtype, rank in rates
    }


def _link_rates(facts: Sequence[Figures], found: Figures) -> Rates[tuple[int, int]]:
    """Return bytes/s by source and target, over the time of a round trip; a link's peers are of the same kind.

    A link that was too slow to be measured has a rate of 0. Bandwidth without latency is not used, as it has the errors
    of both; nor is the latency, of which a few microseconds depend on the cores that two ranks happen to run on.
    """

    def kind(source: int, target: int) -> Hashable:
        one, other = facts[source], facts[target]
        if one["node"] != other["node"]:
            return "between nodes"
        if not (one["gpu"] and other["gpu"]):
            return "within a node"
        return gpu_state.link(one["seen"], one["gpu"]["uuid"], other["gpu"]["uuid"])

    rates = {
        (pair["source"], pair["target"]): max(
            (size["bytes"] / size["seconds"]["median"] for size in pair["sizes"][-1:]), default=0.0
        )
        for pair in found["pairs"]
    }
    return rates, {pair: kind(*pair) for pair in rates}


def _gpu_findings(job: Job, before: Sequence[Figures], after: Sequence[Figures]) -> list[Finding]:
    """Find problems of the GPUs when idle and after load, each once."""
    found: dict[tuple[str, int], Finding] = {}
    for facts in (before, after):
        for rank, of in enumerate(facts):
            if of["gpu"]:
                users = sum(other["gpu"] is not None and other["gpu"]["uuid"] == of["gpu"]["uuid"] for other in facts)
                for finding in diagnosis.gpu_troubles(rank, of["gpu"], users, job.peers[rank].cores):
                    found.setdefault((finding.kind, rank), finding)
    return list(found.values())


def _loaded(facts: Sequence[Figures], load: Sequence[OtherLoad]) -> set[int]:
    """Return the ranks that other processes slowed down."""
    of = {one.node: one for one in load}
    return {rank for rank, fact in enumerate(facts) if of[fact["node"]].slows(rank)}


def _why_busy(load: Sequence[OtherLoad]) -> str:
    texts = [f"{one} of node {one.node}" if len(load) > 1 else str(one) for one in load if one.is_busy]
    return "; ".join([*texts, "measure again on a quiet machine"])


def _remarks(job: Job, facts: Sequence[Figures], load: Sequence[OtherLoad]) -> list[str]:
    """Return remarks on conditions that do not make the cluster unsound."""
    found = [f"node {of['node']}: no information about its GPUs: {of['reason']}" for of in facts if of["reason"]]
    found += [f"node {one.node}: {one}, which slows it down" for one in load if one.is_busy]
    if job.world.size == 1:
        found.append("a single rank has no links")
    for node in dict.fromkeys(peer.node for peer in job.peers):
        here = [peer for peer in job.peers if peer.node == node]
        threads, cores = sum(peer.threads for peer in here), len({core for peer in here for core in peer.cores})
        if threads > cores:
            found.append(f"node {node}: {threads} threads of {len(here)} ranks share {cores} cores")
    return list(dict.fromkeys(found))
