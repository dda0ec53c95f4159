"""Runs that do not fit into memory, of machines, GPUs and jobs of made-up sizes, and formats that devices lack."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ptdbench.launch.world import World
from ptdbench.measure.memory import HostMemory
from ptdbench.problems import ConfigError
from ptdbench.setup import checks, run_spec
from tests.conftest import read
from tests.refusals import Abridged, refusal_of

GIB = 2**30

#: 124,439,808 weights of fp32 with a gradient and two numbers of AdamW each: 1.85 GiB, the whole model.
SMALL = ("model=gpt_small", "model.vocabulary=50257", "device=cpu")


@pytest.fixture
def host(monkeypatch):
    def has(total: float, available: float) -> None:
        memory = HostMemory(int(total * GIB), int(available * GIB))
        monkeypatch.setattr(checks, "host_memory", lambda: memory)

    return has


def summarize(*overrides: str, world: World | None = None, gpus: int | None = None) -> None:
    run_spec.summarize(read(*overrides), world, gpus)


refused = partial(refusal_of, summarize)


def test_what_does_not_fit_is_refused(host):
    host(total=4, available=3)
    told = "model=gpt_small: … 1.9 GiB a rank, 3.7 GiB on 2 ranks, … has 2.6 GiB for it (3.0 GiB …); try parallel=fsdp"
    assert refused(*SMALL, "parallel=ddp") == Abridged(told)
    summarize(*SMALL, "parallel=fsdp")


@pytest.mark.parametrize(("total", "available", "overrides", "told"), [
    (4, 1.2, ["parallel=single"], "; try parallel=fsdp on at least 3 such machines"),
    # The first stage has the embedding, the last one the head: shared, twice.
    (2, 2, ["parallel=pdp"], "take up to 1.4 GiB a rank, 2.4 GiB on 2 ranks"),
    (4, 0.1, [], "0 MiB for it (102 MiB available, and memory_reserve=0.1 keeps 410 MiB); close other programs"),
    (4, 4, ["memory_reserve=0.5"], "2.0 GiB for it (4.0 GiB available, and memory_reserve=0.5 keeps 2.0 GiB)"),
])  # fmt: skip
def test_other_layouts_and_machines(host, total, available, overrides, told):
    host(total, available)
    assert told in refused(*SMALL, *overrides)


def test_ranks_that_run_already_are_compared_with_all_the_memory(host):
    host(total=4, available=0.5)
    two_of_four = World(0, 4, 0, 2, "torchrun")
    summarize(*SMALL, "parallel=fsdp", world=two_of_four)
    assert "1.9 GiB a rank, 3.7 GiB on 2 ranks, and this machine has 3.6 GiB" in refused(*SMALL, world=two_of_four)


def test_the_check_can_be_left_out_also_of_an_optimizer_whose_memory_cannot_be_known(host):
    host(total=1, available=0)
    sparse = ("optimizer._target_=torch.optim.SparseAdam", "~optimizer.weight_decay", "~optimizer.fused")
    assert "; memory_reserve=null skips the memory check" in refused(*SMALL, *sparse)
    summarize(*SMALL, *sparse, "memory_reserve=null")


def test_a_small_model_is_not_looked_at_closely(host, monkeypatch):
    host(total=16, available=16)
    monkeypatch.setattr(checks.TrainingSpec, "footprints", lambda _: pytest.fail("it takes tens of milliseconds"))
    summarize("model=gpt_tiny", "device=cpu")


def test_a_job_is_compared_with_what_is_asked_for_its_nodes(host):
    host(total=1, available=0)  # of the machine that submits
    shape = World(0, 4, 0, 2, "SLURM", nodes=2)
    cluster = ("cluster=slurm", *SMALL, "parallel=ddp", "cluster.nodes=2", "cluster.ranks_per_node=2")
    summarize(*cluster, world=shape, gpus=0)  # nothing is asked for
    summarize(*cluster, "cluster.mem_gb=5", world=shape, gpus=0)
    assert "3.7 GiB on 2 ranks, and a node of the job has 3.0 GiB for it (cluster.mem_gb=3)" in refused(
        *cluster, "cluster.mem_gb=3", world=shape, gpus=0
    )


def test_what_is_offloaded_is_compared_with_the_memory_of_the_machine(host):
    host(total=2, available=2)
    offloaded = ("parallel=fsdp", "offload=optimizer_and_weights", "device=cuda")
    spec = run_spec.specify(read(*SMALL, *offloaded), None, gpus=2)
    assert spec.device_type == "cuda"
    with pytest.raises(ConfigError, match=r"2\.5 GiB on 2 ranks, and this machine has 1\.8 GiB for it"):
        run_spec.check_memory(spec, None)


@pytest.mark.parametrize(("ranks", "world", "fits"), [("[0,9]", None, True), ("null", 2, False)])
def test_of_virtual_gpus_the_ranks_count_that_are_carried_out_here(host, ranks, world, fits):
    """Of 16 on 8 nodes of two, with 0.9 GiB each."""
    host(total=4, available=4)
    words = ("parallel=fsdp", "offload=optimizer_and_weights", "device=auto", "virtual=h100", "train.global_batch=16")
    nodes = ("cluster.nodes=8", "cluster.ranks_per_node=2", "parallel.replicate=8", "parallel.shard=2")
    asked = read(*SMALL, *words, *nodes, f"virtual.ranks={ranks}")
    local = World(0, 16, 0, world, "local", nodes=8) if world else None
    spec = run_spec.specify(asked, local)
    if fits:
        run_spec.check_memory(spec, local)
    else:
        with pytest.raises(ConfigError, match="on 16 ranks, and this machine has"):
            run_spec.check_memory(spec, local)


def test_a_gpu_is_asked_for_its_memory(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA L4", total_memory=2 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 2 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB // 2)
    spec = run_spec.specify(read(*SMALL), World(0, 2, 0, 2, "torchrun"))
    room = checks.on_gpu(torch.device("cuda", 0), 0.1, buffers=GIB // 2)
    gpu = "NVIDIA L4: of 2.0 GiB 1.5 GiB are free, NCCL takes about 512 MiB, memory_reserve=0.1 keeps 205 MiB"
    told = f"… and its GPU has 819 MiB for it ({gpu}); try parallel=fsdp on at least 3 such GPUs"
    assert refusal_of(checks.check_memory, spec.training, room) == Abridged(told)


GPU = torch.device("cuda", 0)


@pytest.fixture
def fit(monkeypatch):
    """Say what is wrong with a precision on a kind of device, or on a GPU of this name and compute capability."""
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    monkeypatch.setattr(checks, "has_torchao", lambda: True)

    def wrong(precision: str, device_type: str = "cuda", name: str = "", *capability: int) -> str | None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        try:
            checks.check_precision(precision, device_type)
            if name:
                checks.check_gpu_precision(precision, GPU)
        except ConfigError as error:
            return str(error).removeprefix(f"precision={precision}: ")
        return None

    return wrong


V100, A100 = ("Tesla V100-SXM2-32GB", 7, 0), ("NVIDIA A100-SXM4-80GB", 8, 0)


@pytest.mark.parametrize(("precision", "gpu", "told"), [
    ("tf32", None, "TF32 is a format of GPUs; try fp32, bf16"),
    ("fp8", None, "FP8 is a format of GPUs; try fp32, bf16"),
    *((precision, None, None) for precision in ("fp32", "bf16", "fp16", "nonsense")),  # refused elsewhere
    ("bf16", V100, f"{V100[0]} (compute capability 7.0) has no BF16 units, and torch emulates it slowly; try fp16"),
    ("tf32", V100, f"{V100[0]} (compute capability 7.0) has no TF32 units; try fp32, fp16"),
    *((precision, V100, None) for precision in ("fp32", "fp16")),
    *((precision, A100, None) for precision in ("fp32", "tf32", "bf16", "fp16")),
    ("fp8", A100, f"{A100[0]} (compute capability 8.0) has no FP8 units; try fp16, bf16"),
    ("fp8", ("NVIDIA L4", 8, 9), None),
    ("fp8", ("NVIDIA H200", 9, 0), None),
])  # fmt: skip
def test_a_format_is_one_of_the_device(fit, precision, gpu, told):
    assert (fit(precision, "cuda", *gpu) if gpu else fit(precision, "cpu")) == told


@pytest.mark.parametrize(("override", "wrong", "right"), [("0", "tf32", "fp32"), ("1", "fp32", "tf32")])
def test_what_the_environment_overrides_is_refused(fit, monkeypatch, override, wrong, right):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    assert fit(wrong) == Abridged(f"is overridden … by NVIDIA_TF32_OVERRIDE={override} …; unset it, or try {right}")
    assert [fit(precision) for precision in (right, "bf16", "fp16")] == [None] * 3
    assert fit("fp32", "cpu") is None


def test_fp8_needs_torchao(fit, monkeypatch):
    monkeypatch.setattr(checks, "has_torchao", lambda: False)
    assert fit("fp8") == "needs the package torchao, which is not installed; try pip install 'ptdbench[fp8]', or bf16"


@pytest.mark.parametrize(("precision", "architecture", "told"), [
    ("bf16", "gfx90a:sramecc+:xnack-", None),
    ("fp8", "gfx90a:sramecc+:xnack-", "AMD Instinct has no FP8 units; try bf16"),
    ("fp8", "gfx942:sramecc+:xnack-", None),
])  # fmt: skip
def test_amd_goes_by_the_architecture_as_capabilities_are_other_numbers(
    fit, monkeypatch, precision, architecture, told
):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=architecture))
    assert fit(precision, "cuda", "AMD Instinct", 1, 0) == told


def test_a_cpu_is_not_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: pytest.fail("asked"))
    checks.check_gpu_precision("bf16", torch.device("cpu"))
