"""Findings: problems in the measurements of a cluster's ranks, in words."""

import statistics
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ptdbench.grouping import grouped
from ptdbench.measure.gpu_state import THROTTLES, Gpu
from ptdbench.measure.results import Finding, Verdict
from ptdbench.terminal import rank_names

T = TypeVar("T", bound=Hashable)

#: Keys of :func:`ptdbench.measure.hardware.environment` that must be the same on all ranks.
VERSIONS = ("ptdbench", "python", "torch", "numpy", "cuda", "cudnn", "nccl", "driver", "git_commit")


def slow(rates: Mapping[T, float], peers: Mapping[T, Hashable], tolerance: float) -> dict[T, float]:
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


def best_of(attempts: Sequence[Mapping[T, float]]) -> dict[T, float]:
    """Return the highest rate of each, as interference only makes a device slower."""
    return {name: max(rates[name] for rates in attempts if name in rates) for rates in attempts for name in rates}


def slow_ranks(slow_ones: Mapping[tuple[str, int], float], attempts: int, loaded: Collection[int]) -> Iterator[Finding]:
    """Yield findings for slow ranks by dtype and rank, with their fraction of the peers' median.

    ``loaded``: the ranks slowed down by other processes.
    """
    for (dtype, rank), share in slow_ones.items():
        text = f"rank {rank} reaches {_share(share)} of its peers' median in {dtype} products"
        yield Finding("slow rank", [rank], f"{text}, best of {attempts}", beside_load=rank in loaded)


def slow_links(slow_ones: Mapping[tuple[int, int], float], attempts: int, loaded: Collection[int]) -> Iterator[Finding]:
    """Yield findings for slow links; arguments as for :func:`slow_ranks`."""
    for (source, target), share in slow_ones.items():
        text = f"rank {source} sends to rank {target} at {_share(share)} of the median of similar links"
        beside_load = not {source, target}.isdisjoint(loaded)
        yield Finding("slow link", [source, target], f"{text}, best of {attempts}", beside_load)


def verdict(findings: Sequence[Finding]) -> Verdict:
    """Return ``sound`` without findings, ``busy`` if other load may have caused all of them, else ``unsound``."""
    if not findings:
        return "sound"
    return "busy" if all(finding.beside_load for finding in findings) else "unsound"


def different_versions(environments: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding, with all values, for each property that differs between ranks."""
    for name in VERSIONS:
        having = grouped((str(environment.get(name)), rank) for rank, environment in enumerate(environments))
        if len(having) > 1:
            values = ", ".join(f"{value} on {rank_names(ranks)}" for value, ranks in having.items())
            rarest = min(having.values(), key=len)
            yield Finding("versions", rarest, f"{name} differs: {values}")


def gpu_troubles(rank: int, gpu: Gpu, users: int, cores: Sequence[int]) -> Iterator[Finding]:
    """Yield findings for one rank's GPU; ``users``: ranks that use it; ``cores``: that this rank may run on."""
    throttled = sorted(THROTTLES & set(gpu.clock_reasons or ()))
    if throttled:
        text = f"the GPU of rank {rank} is throttled: {', '.join(throttled)}, at {gpu.temperature_celsius} °C"
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


def _share(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"
