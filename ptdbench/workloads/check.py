"""The workload ``check``: is this cluster sound? Short versions of the other measurements, and a verdict.

Whatever looks slow is measured again, on all ranks, before it is reported, and the best attempt counts: on a shared
machine anything may be slow once. If other load may be the cause, the verdict is ``busy``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

from ptdbench.grouping import grouped
from ptdbench.job import Job, Outcome
from ptdbench.launch.collect import gather
from ptdbench.measure import node_state, results
from ptdbench.measure.hardware import environment
from ptdbench.measure.node_state import Gpu, Gpus
from ptdbench.measure.products import ProductShape, time_products
from ptdbench.measure.results import P2P, Finding, Matmul, OtherLoad, Pair, Verdict
from ptdbench.measure.timing import median_of
from ptdbench.problems import Problem, at_least, require
from ptdbench.terminal import rank_names
from ptdbench.workloads import collectives, hello, point_to_point
from ptdbench.workloads.collectives import Collectives
from ptdbench.workloads.point_to_point import PointToPoint

R = TypeVar("R")
T = TypeVar("T", bound=Hashable)

#: The rate of each device or link, and the key of the peers to compare it with.
Rates = tuple[dict[T, float], dict[T, Hashable]]

#: The matrix product by device type: large enough to be compute-bound, and short.
_SHAPES = {"cpu": ProductShape.of(1024), "cuda": ProductShape.of(8192)}
_DTYPES = ("fp32", "bf16")
_SECONDS = 0.5
_MESSAGE_BYTES = 2**24

#: With more ranks, each sends only to the next one: the number of pairs grows quadratically.
_MOST_RANKS_IN_PAIRS = 8

#: Keys of :func:`ptdbench.measure.hardware.environment` that must be the same on all ranks.
_VERSIONS = ("ptdbench", "python", "torch", "numpy", "cuda", "cudnn", "nccl", "driver", "git_commit")

_FEW_COLLECTIVES = Collectives(
    ops=["all_reduce", "all_gather", "broadcast"], min_bytes=2**10, max_bytes=2**20, factor=2**10
)


class Unsound(Exception):
    """This cluster has a problem."""


class Busy(Exception):
    """It is unclear whether this cluster is sound, as other processes used it."""


@dataclass(frozen=True)
class Check:
    """Check the ranks and the links between them."""

    tolerance: float = 0.05  #: How far below the median of its peers a rank or link may be, as a fraction of it.
    attempts: int = 5  #: How often a suspicious rank or link is measured before it is reported.

    trains = False

    def __post_init__(self) -> None:
        """Raise ConfigError for options that are invalid on any cluster."""
        wrong = not 0 < self.tolerance < 1
        rule = "must be between 0 and 1, a fraction of the median"
        require(
            Problem("tolerance", self.tolerance, rule, "0.05 is 5%") if wrong else None,
            *at_least(1, attempts=self.attempts),
        )

    def check(self, world_size: int, device_type: str, backend: str) -> None:
        """Raise ConfigError for a backend that cannot send; a single rank without links is accepted."""
        if world_size > 1:
            PointToPoint().check(world_size, device_type, backend)

    def __call__(self, job: Job) -> Outcome:
        """Run one rank's part."""
        report = self.examine(job)
        errors = {"sound": None, "busy": Busy(_texts(report)), "unsound": Unsound(_texts(report))}
        return Outcome(check=report, error=errors[report.verdict])

    def examine(self, job: Job) -> results.Check:
        """Measure and evaluate; called in all ranks, with the same result.

        Raises:
            ArithmeticError: A sum, a product or a message is wrong, so that no result can be trusted.
        """
        ranks = hello.meet(job)
        facts: list[_Facts] = gather(_Facts.of(job))
        products = self._until_sound(job, lambda: self.products(job), partial(_product_rates, job))
        links = self._until_sound(job, lambda: self.messages(job), partial(_link_rates, facts))
        together = collectives.measure(job, _FEW_COLLECTIVES) if job.world.size > 1 else None
        warm: list[_Facts] = gather(_Facts.of(job))  # now under heat and load
        findings = [
            *different_versions([of_rank.environment for of_rank in facts]),
            *_gpu_findings(job, facts, warm),
            *slow_ranks(products.slow, products.attempts, _loaded(facts, products.load)),
            *slow_links(links.slow, links.attempts, _loaded(facts, links.load)),
        ]
        verdict = verdict_on(findings)
        load = [  # the heavier load of each node
            max(of_node, key=attrgetter("weight")) for of_node in zip(products.load, links.load, strict=True)
        ]
        return results.Check(
            sound=verdict == "sound",
            verdict=verdict,
            busy=_why_busy(load) if verdict == "busy" else None,
            findings=findings,
            remarks=_remarks(job, facts, load),
            tolerance=self.tolerance,
            attempts={"matmul": products.attempts, "p2p": links.attempts},
            other_load={"matmul": products.load, "p2p": links.load},
            hello=ranks,
            versions={name: facts[0].environment.get(name) for name in _VERSIONS},
            matmul=products.first,
            p2p=links.first,
            collectives=together,
        )

    def products(self, job: Job) -> Matmul:
        """Measure the devices briefly."""
        shapes, alive = [_SHAPES[job.device.type]], job.watchdog.alive
        return time_products(job.world, job.device, shapes, _DTYPES, _SECONDS, alive)

    def messages(self, job: Job) -> P2P | None:
        """Measure the links briefly; ``None`` for a single rank."""
        if job.world.size == 1:
            return None
        pairs = "all" if job.world.size <= _MOST_RANKS_IN_PAIRS else "ring"
        size = {"min_bytes": _MESSAGE_BYTES, "max_bytes": _MESSAGE_BYTES}
        return point_to_point.measure(job, PointToPoint(pairs=pairs, **size))

    def _until_sound(self, job: Job, measure: Callable[[], R], rates_of: Callable[[R], Rates[T]]) -> _Measured[R, T]:
        """Measure until nothing looks slow or attempts run out."""
        watch = node_state.LoadWatch(job.device)
        first = latest = measure()
        seen = []
        while True:
            rates, peers = rates_of(latest)
            seen.append(rates)
            slow = slow_rates(best_rates(seen), peers, self.tolerance)
            if not slow or len(seen) == self.attempts:
                return _Measured(first, slow, len(seen), watch.stop())
            latest = measure()


@dataclass(frozen=True)
class _Measured(Generic[R, T]):
    """Figures that were measured until none looked slow."""

    first: R  #: The figures of the first attempt.
    slow: dict[T, float]  #: The best rates that are slow, as a fraction of their peers' median.
    attempts: int  #: Number of measurements.
    load: list[OtherLoad]  #: Other load of each node meanwhile.


def _texts(report: results.Check) -> str:
    return "; ".join([*filter(None, [report.busy]), *(finding.text for finding in report.findings)])


@dataclass(frozen=True)
class _Facts:
    """Facts about a rank's node."""

    node: str  #: Its name.
    environment: Mapping[str, Any] = field(default_factory=dict)  #: Versions and hardware.
    seen: Gpus = field(default_factory=Gpus)  #: All GPUs; none if the run does not use them.
    gpu: Gpu | None = None  #: The rank's GPU.

    @classmethod
    def of(cls, job: Job) -> _Facts:
        """Return this rank's facts."""
        node, installed = job.peers[job.world.rank].node, environment(job.device.type)
        if job.device.type != "cuda":
            return cls(node, installed)
        seen = node_state.inspect_gpus()
        return cls(node, installed, seen, seen.get(node_state.gpu_identity(job.device)))


def _product_rates(job: Job, matmul: Matmul) -> Rates[tuple[str, int]]:
    """Return rates by dtype and rank; peers have the same device and number of threads."""
    rates = {(product.dtype, rank.rank): product.median for rank in matmul.ranks for product in rank.products}
    return rates, {(dtype, rank): (dtype, matmul.ranks[rank].device, job.peers[rank].threads) for dtype, rank in rates}


def _link_rates(facts: Sequence[_Facts], p2p: P2P | None) -> Rates[tuple[int, int]]:
    """Return bytes/s by source and target, over the time of a round trip; a link's peers are of the same kind.

    Bandwidth without latency would have the errors of both, and latency varies by a few microseconds with the cores
    that two ranks happen to run on.
    """

    def kind(source: _Facts, target: _Facts) -> Hashable:
        if source.node != target.node:
            return "between nodes"
        return source.seen.links.get((source.gpu.uuid, target.gpu.uuid)) if source.gpu and target.gpu else "in a node"

    def rate(pair: Pair) -> float:
        size = pair.sizes[-1]
        return size.bytes / median_of(size.seconds)

    rates = {(pair.source, pair.target): rate(pair) for pair in (p2p.pairs if p2p else ())}
    return rates, {(source, target): kind(facts[source], facts[target]) for source, target in rates}


def slow_rates(rates: Mapping[T, float], peers: Mapping[T, Hashable], tolerance: float) -> dict[T, float]:
    """Return the rates more than ``tolerance``, a fraction, below the median of their peers, as fractions of it.

    Peers have equal values in ``peers``. The median excludes the rate itself, as neither of two different rates is far
    from the median of both; the lower of two middle values is used, so that a single fast peer does not make the others
    slow.
    """
    shares = {}
    for name, rate in rates.items():
        others = [rates[other] for other in rates if other != name and peers[other] == peers[name]]
        if others and rate < (1 - tolerance) * (usual := statistics.median_low(others)):
            shares[name] = rate / usual
    return shares


def best_rates(attempts: Sequence[Mapping[T, float]]) -> dict[T, float]:
    """Return the highest rate of each, as interference only makes a device slower."""
    return {name: max(rates[name] for rates in attempts if name in rates) for rates in attempts for name in rates}


def slow_ranks(shares: Mapping[tuple[str, int], float], attempts: int, loaded: Collection[int]) -> Iterator[Finding]:
    """Yield findings for slow ranks by dtype and rank, with their fraction of the peers' median.

    ``loaded``: the ranks slowed down by other processes.
    """
    for (dtype, rank), share in shares.items():
        text = f"rank {rank} reaches {_share(share)} of its peers' median in {dtype} products"
        yield Finding("slow rank", [rank], f"{text}, best of {attempts}", beside_load=rank in loaded)


def slow_links(shares: Mapping[tuple[int, int], float], attempts: int, loaded: Collection[int]) -> Iterator[Finding]:
    """Yield findings for slow links; arguments as for :func:`slow_ranks`."""
    for (source, target), share in shares.items():
        text = f"rank {source} sends to rank {target} at {_share(share)} of the median of similar links"
        beside_load = not {source, target}.isdisjoint(loaded)
        yield Finding("slow link", [source, target], f"{text}, best of {attempts}", beside_load)


def _share(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"


def different_versions(environments: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding, with all values, for each property that differs between ranks."""
    for name in _VERSIONS:
        having = grouped((str(environment.get(name)), rank) for rank, environment in enumerate(environments))
        if len(having) > 1:
            values = ", ".join(f"{value} on {rank_names(ranks)}" for value, ranks in having.items())
            rarest = min(having.values(), key=len)
            yield Finding("versions", rarest, f"{name} differs: {values}")


def _gpu_findings(job: Job, before: Sequence[_Facts], after: Sequence[_Facts]) -> list[Finding]:
    """Return the problems of the GPUs when idle and after load, each once."""
    findings: dict[tuple[str, int], Finding] = {}
    for facts in (before, after):
        uuids = [of_rank.gpu and of_rank.gpu.uuid for of_rank in facts]
        for rank, of_rank in enumerate(facts):
            if gpu := of_rank.gpu:
                for finding in gpu_troubles(rank, gpu, uuids.count(gpu.uuid), job.peers[rank].cores):
                    findings.setdefault((finding.kind, rank), finding)
    return list(findings.values())


def gpu_troubles(rank: int, gpu: Gpu, users: int, cores: Sequence[int]) -> Iterator[Finding]:
    """Yield findings for one rank's GPU; ``users``: ranks that use it; ``cores``: that this rank may run on."""
    if gpu.throttles:
        text = f"the GPU of rank {rank} is throttled: {', '.join(gpu.throttles)}, at {gpu.temperature_celsius} °C"
        yield Finding("throttled", [rank], text)
    others = (gpu.processes or 0) - users
    if others > 0:
        text = f"the GPU of rank {rank} is used by {others} other process{'es' * (others != 1)}"
        yield Finding("busy", [rank], text, beside_load=True)
    limit, default = gpu.power_limit_watts, gpu.power_limit_default_watts
    if limit and default and limit < default:
        text = f"the GPU of rank {rank} is limited to {limit:.0f} W, below the default {default:.0f} W"
        yield Finding("power limit", [rank], text)
    if gpu.near_cores and not set(gpu.near_cores) & set(cores):
        text = f"rank {rank} cannot run on any core near its GPU"
        yield Finding("far cores", [rank], text)


def verdict_on(findings: Sequence[Finding]) -> Verdict:
    """Return ``sound`` without findings, ``busy`` if other load may have caused all of them, else ``unsound``."""
    if not findings:
        return "sound"
    return "busy" if all(finding.beside_load for finding in findings) else "unsound"


def _loaded(facts: Sequence[_Facts], load: Sequence[OtherLoad]) -> set[int]:
    of_nodes = {of_node.node: of_node for of_node in load}
    return {rank for rank, of_rank in enumerate(facts) if of_nodes[of_rank.node].slows(rank)}


def _why_busy(load: Sequence[OtherLoad]) -> str:
    names = {of_node.node: f" of node {of_node.node}" if len(load) > 1 else "" for of_node in load}
    busy = [f"{of_node}{names[of_node.node]}" for of_node in load if of_node.is_busy]
    return "; ".join([*busy, "measure again on a quiet machine"])


def _remarks(job: Job, facts: Sequence[_Facts], load: Sequence[OtherLoad]) -> list[str]:
    """Return remarks on conditions that do not make the cluster unsound."""
    unseen = (of_rank for of_rank in facts if of_rank.seen.reason)
    remarks = [f"node {of_rank.node}: no GPU information: {of_rank.seen.reason}" for of_rank in unseen]
    remarks += [f"node {of_node.node}: {of_node}, which slows it down" for of_node in load if of_node.is_busy]
    if job.world.size == 1:
        remarks.append("a single rank has no links")
    for node, peers in grouped((peer.node, peer) for peer in job.peers).items():
        threads, cores = sum(peer.threads for peer in peers), len({core for peer in peers for core in peer.cores})
        if threads > cores:
            remarks.append(f"node {node}: {threads} threads of {len(peers)} ranks share {cores} cores")
    return list(dict.fromkeys(remarks))
