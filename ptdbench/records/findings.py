"""What workloads that do not train have found: each in a field of its record that has the workload's name.

These types describe; a record is not checked against them, since a workload of one's own may find anything.
"""

from __future__ import annotations

from typing import Any, TypedDict

from ptdbench.records.schema import StepSeconds


class RankHello(TypedDict):
    """One rank as it describes itself."""

    rank: int
    """Its number among all ranks."""
    local_rank: int
    """Its number on its node."""
    local_size: int
    """Ranks on its node."""
    node: str
    """The node as the cluster names it."""
    host: str
    """The machine's own name."""
    device: str
    """``cpu``, or the GPU with its name."""
    cores: list[int]
    """CPU cores that it may use."""
    threads: int
    """Threads that it computes with."""
    settings: dict[str, str]
    """Environment variables that matter to communication."""


class Hello(TypedDict):
    """Who is there (``workload=hello``)."""

    launcher: str
    """What started the ranks."""
    backend: str
    """The backend of the process group."""
    address: str
    """Where the ranks met."""
    port: int
    """The port there."""
    ranks: list[RankHello]
    """Every rank, in order."""


class Product(TypedDict):
    """A matrix product on one device; rates in FLOP/s."""

    dtype: str
    """``fp32``, ``tf32``, ``bf16`` or ``fp16``."""
    shape: str
    """``MxNxK``."""
    repetitions: int
    """How often it was timed."""
    mean: float
    """The mean rate."""
    median: float
    """The median rate."""
    maximum: float
    """The highest rate."""


class Copy(TypedDict):
    """A copy of memory; rates in bytes/s."""

    kind: str
    """From where to where."""
    bytes: int
    """Its size."""
    repetitions: int
    """How often it was timed."""
    mean: float
    """The mean rate."""
    median: float
    """The median rate."""
    maximum: float
    """The highest rate."""


class RankProducts(TypedDict):
    """What one rank's device reaches."""

    rank: int
    """The rank."""
    device: str
    """Its device."""
    products: list[Product]
    """Matrix products, by shape and dtype."""
    copies: list[Copy]
    """Copies of memory."""


class Ceiling(TypedDict):
    """The best that a kind of device reaches, which later runs are held against."""

    device: str
    """The device."""
    driver: str | None
    """Version of its driver; null on a CPU."""
    torch: str
    """Version of PyTorch."""
    dtype: str
    """The arithmetic."""
    threads: int
    """Threads of a rank."""
    ranks: int
    """Ranks that measured it."""
    shape: str
    """The product that was fastest."""
    flops_per_second: float
    """Its median rate."""
    share_of_peak: float | None
    """That rate over the dense peak by the data sheet."""
    peak_reason: str | None
    """Why there is no peak."""


class Matmul(TypedDict):
    """What the devices reach (``workload=matmul``)."""

    ranks: list[RankProducts]
    """Every rank, in order."""
    ceilings: list[Ceiling]
    """One for each kind of device and arithmetic."""
    kept: str | None
    """Why the ceilings are not on record for later runs; null if they are."""


class Cut(TypedDict, total=False):
    """Sizes that were left out because they would have taken too long."""

    source: int
    """The rank that sends, of a link in one direction."""
    target: int
    """The rank that receives."""
    ranks: list[int]
    """The two ranks, of a link in both directions."""
    op: str
    """The collective."""
    dtype: str | None
    """Its dtype."""
    reduction: str | None
    """Its reduction."""
    mode: str
    """Its mode."""
    from_bytes: int
    """The smallest size that was left out."""
    reason: str
    """Why."""


class Fit(TypedDict):
    """The line ``alpha + beta * bytes`` in seconds, fitted to what was measured."""

    alpha: float
    """Seconds of an empty message."""
    beta: float
    """Seconds a byte."""
    alpha_error: float
    """Standard error of ``alpha``."""
    beta_error: float
    """Standard error of ``beta``."""
    r2: float
    """Share of the weighted variance of the times that the line explains."""
    max_relative_error: float
    """The largest relative distance of the line from a time."""
    points: int
    """How many sizes it is fitted to."""


class CollectiveFit(Fit):
    """The line of a collective."""

    op: str
    """The collective."""
    dtype: str | None
    """The dtype; null for a barrier."""
    reduction: str | None
    """The reduction, of those that reduce."""
    mode: str
    """How it was called."""


class MessageSize(TypedDict, total=False):
    """Messages of one size between two ranks."""

    bytes: int
    """The size."""
    repetitions: int
    """How often it was timed."""
    seconds: StepSeconds
    """The time of the message and its answer, or of the exchange in both directions."""
    one_way: float
    """Seconds of the message without its answer; of a link in one direction."""
    bandwidth: float
    """Bytes a second."""


class Pair(TypedDict):
    """A link from one rank to another."""

    source: int
    """The rank that sends."""
    target: int
    """The rank that receives."""
    latency: float | None
    """Seconds of an answer, one way; null if that took too long."""
    bandwidth: float | None
    """Bytes a second at the largest size."""
    fit: Fit | None
    """The line through all sizes; null where they are too few."""
    sizes: list[MessageSize]
    """What was measured."""


class BothWays(TypedDict):
    """Two ranks that send to each other at once."""

    ranks: list[int]
    """The two."""
    sizes: list[MessageSize]
    """What was measured; the bandwidth is that of both directions together."""


class Overlap(TypedDict):
    """Communication beside computation."""

    ranks: list[int]
    """The two ranks."""
    bytes: int
    """Size of the message."""
    communication: float
    """Seconds of the message alone."""
    computation: float
    """Seconds of the computation alone."""
    together: float
    """Seconds of both at once."""
    hidden: float
    """Share of the shorter one that the longer one hid."""


class P2P(TypedDict):
    """Links between ranks (``workload=p2p``)."""

    pairs: list[Pair]
    """One for each direction."""
    both: list[BothWays]
    """Both directions at once."""
    overlap: list[Overlap]
    """How far messages hide behind computation."""
    cut: list[Cut]
    """What was left out."""


class CollectiveResult(TypedDict):
    """One collective at one size."""

    op: str
    """The collective."""
    dtype: str | None
    """The dtype; null for a barrier."""
    reduction: str | None
    """The reduction, of those that reduce."""
    mode: str
    """How it was called: ``blocking`` or ``async``."""
    bytes: int
    """The size, counted as nccl-tests does."""
    ranks: int
    """Ranks of a group."""
    repetitions: int
    """How often it was timed."""
    seconds: StepSeconds
    """Its time on the slowest rank."""
    post_seconds: float | None
    """Median seconds that the host takes to begin it, in ``async``."""
    algbw: float | None
    """Bytes over median seconds; null for what moves none."""
    busbw: float | None
    """That times the factor of ``definitions``: what the wires carry."""


class Collectives(TypedDict):
    """Collectives (``workload=collectives``)."""

    group: str
    """The groups that were asked for."""
    groups: list[list[int]]
    """The ranks of each group; all groups work at the same time."""
    definitions: dict[str, Any]
    """How ``algbw`` and ``busbw`` are computed."""
    results: list[CollectiveResult]
    """One for each collective, dtype, mode and size."""
    fits: list[CollectiveFit]
    """One for each collective, dtype, reduction and mode of enough sizes."""
    cut: list[Cut]
    """What was left out."""
    left_out: list[str]
    """Collectives that the backend does not have."""


class Finding(TypedDict):
    """One thing that is wrong."""

    kind: str
    """``slow rank``, ``slow link``, ``versions``, ``throttled``, ``busy``, ``power limit`` or ``far cores``."""
    ranks: list[int]
    """Those that it concerns."""
    text: str
    """For people."""


class Check(TypedDict):
    """Whether the cluster is sound (``workload=check``, or ``check=true`` before a training run)."""

    sound: bool
    """Whether there are no findings."""
    findings: list[Finding]
    """What is wrong."""
    remarks: list[str]
    """What a reader should know, and what makes nothing unsound."""
    tolerance: float
    """How far from its peers a rank or link may be: a share of their median."""
    attempts: dict[str, int]
    """How often each workload was repeated for what looked slow."""
    hello: Hello
    """Who is there."""
    versions: dict[str, Any]
    """Versions of rank 0."""
    gpus: list[Any]
    """What each rank's GPU says of itself; null on a CPU."""
    links: dict[str, Any]
    """How the ranks of each node are connected."""
    matmul: Matmul
    """What the devices reach."""
    p2p: P2P | None
    """Links; null for one rank."""
    collectives: Collectives | None
    """A few collectives; null for one rank."""


class Findings(TypedDict, total=False):
    """Fields of a record that only some workloads have."""

    hello: Hello
    """Who is there."""
    matmul: Matmul
    """What the devices reach."""
    p2p: P2P
    """Links between ranks."""
    collectives: Collectives
    """Collectives."""
    check: Check
    """Whether the cluster is sound."""
