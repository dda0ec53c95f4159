"""Results of workloads that do not train, each stored in the record field named after the workload.

These types only describe; records are not checked against them, since a custom workload may store anything.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ptdbench.launch.peers import Peer
from ptdbench.measure.bandwidth import Fit
from ptdbench.measure.ceiling import Ceiling
from ptdbench.measure.diagnosis import Finding
from ptdbench.measure.other_load import OtherLoad
from ptdbench.records.schema import StepSeconds


class Hello(Struct):
    """The ranks (``workload=hello``)."""

    launcher: str  #: The launcher.
    backend: str  #: The backend of the process group.
    address: str  #: Address of the rendezvous.
    port: int  #: Its port.
    ranks: list[Peer]  #: Every rank, in order.


class Product(Struct):
    """A matrix product on one device; rates in FLOP/s."""

    dtype: str  #: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
    shape: str  #: ``MxNxK``.
    repetitions: int  #: How often it was timed.
    mean: float  #: The mean rate.
    median: float  #: The median rate.
    maximum: float  #: The highest rate.


class Copy(Struct):
    """A copy of memory; rates in bytes/s."""

    kind: str  #: Source and target.
    bytes: int  #: Size of the copy.
    repetitions: int  #: How often it was timed.
    mean: float  #: The mean rate.
    median: float  #: The median rate.
    maximum: float  #: The highest rate.


class RankProducts(Struct):
    """Rates of one rank's device."""

    rank: int  #: The rank.
    device: str  #: Its device.
    products: list[Product]  #: Matrix products, by shape and dtype.
    copies: list[Copy]  #: Copies of memory.


class Matmul(Struct):
    """Rates of the devices (``workload=matmul``)."""

    ranks: list[RankProducts]  #: Every rank, in order.
    ceilings: list[Ceiling]  #: One for each kind of device and arithmetic.
    other_load: list[OtherLoad]  #: Load by other processes on each node during the measurement.
    kept: str | None = None  #: Why ceilings were not cached for later runs; null if all were.


class Cut(Struct):
    """Sizes that were skipped because they would have taken too long."""

    source: int | None = None  #: The sending rank, for a link in one direction.
    target: int | None = None  #: The receiving rank.
    ranks: list[int] | None = None  #: The two ranks, for a link in both directions.
    op: str | None = None  #: The collective.
    dtype: str | None = None  #: Its dtype.
    reduction: str | None = None  #: Its reduction.
    mode: str | None = None  #: Its mode.
    from_bytes: int | None = None  #: The smallest size that was skipped.
    reason: str | None = None  #: Why.


class CollectiveFit(Fit, frozen=True):
    """The line fitted to a collective."""

    op: str  #: The collective.
    dtype: str | None  #: The dtype; null for a barrier.
    reduction: str | None  #: The reduction; null if the collective does not reduce.
    mode: str  #: How it was called.


class MessageSize(Struct):
    """Messages of one size between two ranks."""

    bytes: int | None = None  #: The size.
    repetitions: int | None = None  #: How often it was timed.
    seconds: StepSeconds | None = None  #: Time of the round trip, or of the exchange in both directions.
    one_way: float | None = None  #: Seconds of the message without its reply, for a link in one direction.
    bandwidth: float | None = None  #: Bytes per second.


class Pair(Struct):
    """A link from one rank to another."""

    source: int  #: The sending rank.
    target: int  #: The receiving rank.
    latency: float | None  #: One-way latency in seconds; null if measuring it would have taken too long.
    bandwidth: float | None  #: Bytes per second at the largest size.
    fit: Fit | None  #: The line fitted to all sizes; null if there are too few.
    sizes: list[MessageSize]  #: The measurements, by size.


class BothWays(Struct):
    """Two ranks that send to each other at once."""

    ranks: list[int]  #: The two ranks.
    sizes: list[MessageSize]  #: The measurements, by size; bandwidths are the sum of both directions.


class Overlap(Struct):
    """Overlap of communication and computation."""

    ranks: list[int]  #: The two ranks.
    bytes: int  #: Size of the message.
    communication: float  #: Seconds of the message alone.
    computation: float  #: Seconds of the computation alone.
    together: float  #: Seconds of both at once.
    hidden: float  #: Share of the shorter of the two that was overlapped.


class P2P(Struct):
    """Links between ranks (``workload=p2p``)."""

    pairs: list[Pair]  #: One per direction.
    both: list[BothWays]  #: Both directions at once.
    overlap: list[Overlap]  #: Overlap of messages and computation.
    cut: list[Cut]  #: Skipped sizes.


class CollectiveResult(Struct):
    """One collective at one size."""

    op: str  #: The collective.
    dtype: str | None  #: The dtype; null for a barrier.
    reduction: str | None  #: The reduction; null if the collective does not reduce.
    mode: str  #: How it was called: ``blocking`` or ``async``.
    bytes: int  #: The size, as nccl-tests defines it.
    ranks: int  #: Ranks per group.
    repetitions: int  #: How often it was timed.
    seconds: StepSeconds  #: Its time on the slowest rank.
    post_seconds: float | None  #: In mode ``async``, median seconds that the host took to launch it.
    algbw: float | None  #: Bytes over median seconds; null for a barrier.
    busbw: float | None  #: ``algbw`` times the factor of ``definitions``: the rate of the links.


class Collectives(Struct):
    """Collectives (``workload=collectives``)."""

    group: str  #: The requested groups.
    groups: list[list[int]]  #: The ranks of each group; all groups run concurrently.
    definitions: dict[str, Any]  #: How ``algbw`` and ``busbw`` are computed.
    results: list[CollectiveResult]  #: One for each collective, dtype, mode and size.
    fits: list[CollectiveFit]  #: One for each collective, dtype, reduction and mode with enough sizes.
    cut: list[Cut]  #: Skipped sizes.
    left_out: list[str]  #: Collectives that the backend does not support.

    #: Why ``fits`` could not be cached for the ``phases`` of later runs; null if they were, or do not cover all ranks.
    kept: str | None = None


class Check(Struct):
    """Whether the cluster is sound (``workload=check``, or ``check=true`` before a training run)."""

    sound: bool  #: Whether there are no findings.
    verdict: str  #: ``sound``, ``busy`` (other load may be the cause of every finding) or ``unsound``.
    busy: str | None  #: Load by other processes on the nodes; null unless the verdict is ``busy``.
    findings: list[Finding]  #: The faults found.
    remarks: list[str]  #: Remarks that do not make the cluster unsound.
    tolerance: float  #: How far below the median of its peers a rank or link may be, as a share of the median.
    attempts: dict[str, int]  #: How often each workload was repeated because something looked slow.
    #: Load by other processes on each node while products (``matmul``) and links (``p2p``) were measured.
    other_load: dict[str, list[OtherLoad]]
    hello: Hello  #: The ranks.
    versions: dict[str, Any]  #: Versions of rank 0.
    gpus: list[Any]  #: State of each rank's GPU, from NVML; null on a CPU.
    links: dict[str, Any]  #: How the ranks of each node are connected.
    matmul: Matmul  #: Rates of the devices.
    p2p: P2P | None  #: Links; null for one rank.
    collectives: Collectives | None  #: A few collectives; null for one rank.


class Findings(Struct):
    """Fields of a record that only some workloads have."""

    hello: Hello | None = None  #: The ranks.
    matmul: Matmul | None = None  #: Rates of the devices.
    p2p: P2P | None = None  #: Links between ranks.
    collectives: Collectives | None = None  #: Collectives.
    check: Check | None = None  #: Whether the cluster is sound.
