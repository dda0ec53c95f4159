"""The results of measurements, as records hold them; they can be read without torch.

The results of a workload that does not train are in the record field named after it. Reading a record does not check
them against :class:`Findings`, as a custom workload may store anything.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ptdbench.launch.world import Peer
from ptdbench.terminal import rank_names

#: Bounded numbers: beyond these limits, derived figures would overflow.
Whole = Annotated[int, Meta(ge=-(2**63) + 1, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Degree = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Amount = Annotated[float, Meta(ge=-1e30, le=1e30)]
Quantity = Annotated[float, Meta(ge=0, le=1e30)]
Positive = Annotated[float, Meta(ge=1e-30, le=1e30)]

#: Whether a cluster is sound; ``busy``: other load may have caused every finding.
Verdict = Literal["sound", "busy", "unsound"]


#: Thresholds of other load, in cores and as a fraction of a node's cores: even an idle machine has some.
LEAST_CORES, LEAST_SHARE = 0.1, 0.005


class OtherLoad(Struct, frozen=True):
    """The load of other processes on one node."""

    node: str  #: The node.
    cores: int  #: Number of cores that the ranks of the node may use.
    taken: float | None  #: Cores that other processes used, on average; null if unknown.
    gpu_ranks: list[int]  #: Ranks whose GPU other processes use.
    on_gpu: bool  #: Whether the ranks measured GPUs.

    @property
    def is_busy(self) -> bool:
        """True if this load may have slowed the measurement down."""
        if self.on_gpu:
            return bool(self.gpu_ranks)
        return self.taken is not None and self.taken > max(LEAST_CORES, LEAST_SHARE * self.cores)

    @property
    def weight(self) -> tuple[int, float]:
        """How heavy it is: its shared GPUs, then its cores."""
        return len(self.gpu_ranks), self.taken or 0.0

    def slows(self, rank: int) -> bool:
        """Return whether this load may have slowed down this rank of the node."""
        return self.is_busy and (not self.on_gpu or rank in self.gpu_ranks)

    def __str__(self) -> str:
        if self.on_gpu:
            return f"other processes use the GPU{'s' * (len(self.gpu_ranks) > 1)} of {rank_names(self.gpu_ranks)}"
        return f"other processes took {self.taken or 0:.1f} of {self.cores} cores"


class StepSeconds(Struct):
    """Location and spread of the timed steps, in seconds; a step takes as long as its slowest rank."""

    median: Positive | None = None  #: The median.
    mean: Positive | None = None  #: The mean.
    p5: Positive | None = None  #: The 5 % quantile.
    p95: Positive | None = None  #: The 95 % quantile.
    ci95: list[Positive] | None = None  #: ``[low, high]``, the 95 % interval of the median; null below six steps.


class Key(Struct, frozen=True):
    """The cache key of a ceiling: everything that it depends on."""

    device: str  #: The GPU's name as reported by torch, or the CPU model.
    driver: str | None  #: Version of the GPU's driver; null on a CPU.
    torch: str  #: Version of PyTorch.
    dtype: str  #: Arithmetic of the products: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
    threads: int | None  #: Threads of a rank; null for a GPU.


class Ceiling(Key, frozen=True):
    """The best rate of a kind of device, to which later runs are compared."""

    ranks: int  #: Number of ranks that measured it.
    shape: str  #: Shape of the fastest product.
    flops_per_second: float  #: Median rate of that product.
    share_of_peak: float | None  #: That rate divided by the data sheet's dense peak.
    peak_reason: str | None  #: Why there is no peak.


class Finding(Struct, frozen=True):
    """One problem of a cluster."""

    kind: str  #: ``slow rank``, ``slow link``, ``versions``, ``throttled``, ``busy``, ``power limit`` or ``far cores``.
    ranks: list[int]  #: The affected ranks.
    text: str  #: The message to show.
    beside_load: bool = False  #: Whether other load may have caused it.


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


class RankProducts(Struct):
    """Rates of one rank's device."""

    rank: int  #: The rank.
    device: str  #: Its device.
    products: list[Product]  #: Matrix products, by shape and dtype.


class Matmul(Struct):
    """Rates of the devices (``workload=matmul``)."""

    ranks: list[RankProducts]  #: Every rank, in order.
    ceilings: list[Ceiling]  #: One for each kind of device and arithmetic.
    kept: str | None = None  #: Why ceilings were not cached for later runs; null if all were.


class Series(Struct):
    """A series of measurements of one collective."""

    op: str  #: The collective.
    dtype: str | None  #: The dtype; null for a barrier.
    reduction: str | None  #: The reduction; null if the collective does not reduce.

    def __str__(self) -> str:
        return " ".join(filter(None, (self.op, self.dtype, self.reduction)))


class CollectiveResult(Series):
    """One collective at one size."""

    bytes: int  #: The size, as nccl-tests defines it.
    ranks: int  #: Ranks per group.
    repetitions: int  #: How often it was timed.
    seconds: StepSeconds  #: Its time on the slowest rank.
    algbw: float | None  #: Bytes over median seconds; null for a barrier.
    busbw: float | None  #: ``algbw`` times the factor of nccl-tests: the rate of the links.


class MessageSize(Struct):
    """Messages of one size between two ranks."""

    bytes: int  #: The size.
    repetitions: int  #: How often it was timed.
    seconds: StepSeconds  #: Time of the round trip.
    one_way: float  #: Seconds of the message without its reply.
    bandwidth: float  #: Bytes per second.


class Pair(Struct):
    """A link from one rank to another."""

    source: int  #: The sending rank.
    target: int  #: The receiving rank.
    latency: float  #: One-way latency in seconds.
    bandwidth: float  #: Bytes per second at the largest size.
    sizes: list[MessageSize]  #: The measurements, by size.


class P2P(Struct):
    """Links between ranks (``workload=p2p``)."""

    pairs: list[Pair]  #: One per direction.


class Collectives(Struct):
    """Collectives (``workload=collectives``)."""

    group: str | list[int]  #: The requested groups.
    groups: list[list[int]]  #: The ranks of each group; all groups run concurrently.
    results: list[CollectiveResult]  #: One for each collective, dtype and size.
    left_out: list[str]  #: Collectives that the backend does not support.


class Check(Struct):
    """Whether the cluster is sound (``workload=check``)."""

    sound: bool  #: Whether there are no findings.
    verdict: str  #: ``sound``, ``busy`` (other load may be the cause of every finding) or ``unsound``.
    busy: str | None  #: Load by other processes on the nodes; null unless the verdict is ``busy``.
    findings: list[Finding]  #: The faults found.
    remarks: list[str]  #: Remarks that do not make the cluster unsound.
    tolerance: float  #: How far below the median of its peers a rank or link may be, as a fraction of it.
    attempts: dict[str, int]  #: How often each workload ran because something looked slow.
    #: Load by other processes on each node while products (``matmul``) and links (``p2p``) were measured.
    other_load: dict[str, list[OtherLoad]]
    hello: Hello  #: The ranks.
    versions: dict[str, Any]  #: Versions of rank 0.
    matmul: Matmul  #: Rates of the devices.
    p2p: P2P | None  #: Links; null for one rank.
    collectives: Collectives | None  #: A few collectives; null for one rank.


class Findings(Struct, kw_only=True):
    """Fields of a record that only some workloads have."""

    hello: Hello | None = None  #: The ranks.
    matmul: Matmul | None = None  #: Rates of the devices.
    p2p: P2P | None = None  #: Links between ranks.
    collectives: Collectives | None = None  #: Collectives.
    check: Check | None = None  #: Whether the cluster is sound.
