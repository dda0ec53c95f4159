"""Runs that do not fit into memory, of machines, GPUs and jobs of made-up sizes, and formats that devices lack."""

from types import SimpleNamespace

import pytest
import torch

from ptdbench.launch.world import World
from ptdbench.measure.memory import HostMemory
from ptdbench.parallel.dims import Dims
from ptdbench.problems import ConfigError
from ptdbench.setup import checks, config, run_spec
from tests.conftest import composed

GIB = 2**30

#: 124,439,808 weights of fp32 with a gradient and two numbers of AdamW each: 1.85 GiB, the whole model.
SMALL = ("model=gpt_small", "model.vocabulary=50257", "device=cpu")


@pytest.fixture
def host(monkeypatch):
    """Gives this machine a memory of so many GiB."""

    def has(total: float, available: float) -> None:
        memory = HostMemory(int(total * GIB), int(available * GIB))
        monkeypatch.setattr(checks, "host_memory", lambda: memory)

    return has


def warning(*overrides: str, world: World | None = None, gpus: int | None = None) -> str | None:
    return run_spec.summarize(config.read(composed(*overrides)), world, gpus).warning


def refused(*overrides: str, world: World | None = None, gpus: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        warning(*overrides, world=world, gpus=gpus)
    return str(caught.value)


def test_what_does_not_fit_is_refused_with_the_figures_and_what_to_try(host):
    host(total=4, available=3)
    assert refused(*SMALL, "parallel=ddp") == (
        "model=gpt_small: weights, gradients and optimizer state take 1.9 GiB a rank, 3.7 GiB on 2 ranks, and this "
        "machine has 2.6 GiB for it (3.0 GiB available, and memory_reserve=0.1 keeps 0.4 GiB); try parallel=fsdp"
    )
    assert warning(*SMALL, "parallel=fsdp") is None


def test_what_is_close_is_a_warning(host):
    host(total=4, available=2.5)
    assert warning(*SMALL, "parallel=fsdp") == (
        "gpt_small fsdp: weights, gradients and optimizer state take 0.9 GiB a rank, 1.9 GiB on 2 ranks, of 2.1 GiB "
        "that this machine has for it; activations need memory too"
    )


def test_what_no_layout_of_this_machine_holds_needs_more_machines(host):
    host(total=4, available=1.2)
    assert refused(*SMALL, "parallel=single").endswith("; try parallel=fsdp on at least 3 such machines")


def test_stages_of_a_pipeline_are_added_up(host):
    host(total=2, available=2)
    said = refused(*SMALL, "parallel=pdp")  # the first stage has the embedding, the last one the head: shared, twice
    assert "take up to 1.4 GiB a rank, 2.4 GiB on 2 ranks" in said


def test_a_machine_without_memory_left(host):
    host(total=4, available=0.1)
    assert refused(*SMALL).endswith(
        "has 0.0 GiB for it (0.1 GiB available, and memory_reserve=0.1 keeps 0.4 GiB); end other programs"
    )


def test_ranks_that_run_already_are_compared_with_all_the_memory(host):
    host(total=4, available=0.5)
    two_of_four = World(0, 4, 0, 2, "torchrun")
    assert warning(*SMALL, "parallel=fsdp", world=two_of_four) is None
    assert "1.9 GiB a rank, 3.7 GiB on 2 ranks, and this machine has 3.6 GiB" in refused(*SMALL, world=two_of_four)


def test_the_reserve_can_be_changed_and_the_check_left_out(host):
    host(total=4, available=4)
    assert "gpt_small ddp: " in (warning(*SMALL, "memory_reserve=0") or "")
    assert "model=gpt_small: " in refused(*SMALL, "memory_reserve=0.5")
    host(total=1, available=0)
    assert warning(*SMALL, "memory_reserve=null") is None


@pytest.mark.parametrize("reserve", ["1", "-0.1"])
def test_a_reserve_that_is_no_part(reserve):
    rule = "must be at least 0 and less than 1, or null to start a run whatever it needs; try 0.1"
    assert refused("device=cpu", f"memory_reserve={reserve}") == f"memory_reserve={reserve}: {rule}"


def test_an_optimizer_whose_memory_cannot_be_known_is_refused(host):
    host(total=4, available=3)
    sparse = ("optimizer._target_=torch.optim.SparseAdam", "~optimizer.weight_decay", "~optimizer.fused")
    assert refused(*SMALL, *sparse) == (
        "optimizer=SparseAdam: the memory of its state is unknown, as it takes no step on tensors without values: "
        "SparseAdam does not support dense gradients, please consider Adam instead; "
        "memory_reserve=null starts the run without knowing"
    )
    assert warning(*SMALL, *sparse, "memory_reserve=null") is None


def test_a_small_model_is_not_looked_at_closely(host, monkeypatch):
    host(total=16, available=16)
    monkeypatch.setattr(checks.TrainingSpec, "footprints", lambda _: pytest.fail("it takes tens of milliseconds"))
    assert warning("model=gpt_tiny", "device=cpu") is None


def test_a_job_is_compared_with_what_is_asked_for_its_nodes(host):
    host(total=1, available=0)  # of the machine that submits
    shape = World(0, 4, 0, 2, "SLURM", nodes=2)
    cluster = ("cluster=slurm", *SMALL, "parallel=ddp", "cluster.nodes=2", "cluster.ranks_per_node=2")
    assert warning(*cluster, world=shape, gpus=0) is None  # nothing is asked for
    assert warning(*cluster, "cluster.mem_gb=5", world=shape, gpus=0) is None
    assert "3.7 GiB on 2 ranks, and a node of the job has 3.0 GiB for it (cluster.mem_gb=3)" in refused(
        *cluster, "cluster.mem_gb=3", world=shape, gpus=0
    )


def test_what_is_offloaded_is_compared_with_the_memory_of_the_machine(host):
    host(total=2, available=2)
    offloaded = ("parallel=fsdp", "offload=optimizer_and_weights", "device=cuda")
    spec = run_spec.specify(config.read(composed(*SMALL, *offloaded)), None, gpus=2)
    assert spec.device_type == "cuda"
    with pytest.raises(ConfigError, match=r"1\.9 GiB on 2 ranks, and this machine has 1\.8 GiB for it"):
        run_spec.check_memory(spec, None)


def test_a_gpu_is_asked_for_its_memory(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA L4", total_memory=2 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 2 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB // 2)
    spec = run_spec.specify(config.read(composed(*SMALL)), World(0, 2, 0, 2, "torchrun"))
    assert spec.training
    with pytest.raises(ConfigError) as caught:
        checks.check_memory(spec.training, checks.on_gpu(torch.device("cuda", 0), 0.1, communicators=2))
    assert str(caught.value) == (
        "model=gpt_small: weights, gradients and optimizer state take 1.9 GiB a rank, and its GPU has 0.8 GiB for it "
        "(NVIDIA L4: of 2.0 GiB 1.5 GiB are free, NCCL takes about 0.5 GiB, memory_reserve=0.1 keeps 0.2 GiB); "
        "try parallel=fsdp on at least 3 such GPUs"
    )


@pytest.mark.parametrize(
    ("degrees", "communicators"),
    [({}, 0), ({"replicate": 8}, 1), ({"replicate": 2, "shard": 4}, 3), ({"pipeline": 4}, 3)],
)
def test_communicators_are_those_of_all_ranks_of_degrees_and_between_stages(degrees, communicators):
    assert Dims(**degrees).communicators == communicators


def test_a_virtual_gpu_lacks_what_a_real_one_would():
    spec = run_spec.specify(config.read(composed(*SMALL[:2], "virtual=h100", "cluster.ranks_per_node=1")), None)
    assert spec.virtual
    gpu = spec.virtual.gpu
    assert checks.on_virtual(gpu, 0.25, 0).size == gpu.memory - gpu.context - gpu.memory // 4


GPU = torch.device("cuda", 0)


def unfit(call, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_cpu_has_no_tf32(monkeypatch):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    assert unfit(checks.check_precision, "tf32", "cpu") == "precision=tf32: TF32 is a format of GPUs; try fp32, bf16"
    for precision in ("fp32", "bf16", "fp16", "nonsense"):  # which is refused elsewhere
        checks.check_precision(precision, "cpu")
    checks.check_precision("tf32", "cuda")


@pytest.mark.parametrize(("override", "wrong", "right"), [("0", "tf32", "fp32"), ("1", "fp32", "tf32")])
def test_what_the_environment_overrides_is_refused(monkeypatch, override, wrong, right):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    assert unfit(checks.check_precision, wrong, "cuda") == (
        f"precision={wrong}: is overridden in NVIDIA's libraries by NVIDIA_TF32_OVERRIDE={override} in the "
        f"environment; unset it, or try {right}"
    )
    for precision in (right, "bf16", "fp16"):
        checks.check_precision(precision, "cuda")
    checks.check_precision("fp32", "cpu")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a compute capability."""

    def be(name: str, *capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)

    return be


def test_bf16_and_tf32_are_refused_where_they_are_emulated(gpu):
    gpu("Tesla V100-SXM2-32GB", 7, 0)
    assert unfit(checks.check_gpu_precision, "bf16", GPU) == (
        "precision=bf16: Tesla V100-SXM2-32GB (compute capability 7.0) has no BF16 units, and torch emulates it "
        "slowly; try fp16"
    )
    assert "has no TF32 units; try fp32, fp16" in unfit(checks.check_gpu_precision, "tf32", GPU)
    for precision in ("fp32", "fp16"):
        checks.check_gpu_precision(precision, GPU)
    gpu("NVIDIA A100-SXM4-80GB", 8, 0)
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        checks.check_gpu_precision(precision, GPU)


def test_capabilities_of_amd_are_other_numbers(gpu, monkeypatch):
    gpu("AMD Instinct MI100", 9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    checks.check_gpu_precision("bf16", GPU)


def test_fp8_is_refused_without_a_gpu_its_units_or_torchao(gpu, monkeypatch):
    assert unfit(checks.check_precision, "fp8", "cpu") == "precision=fp8: FP8 is a format of GPUs; try fp32, bf16"
    monkeypatch.setattr(checks.fp8, "is_installed", lambda: False)
    assert unfit(checks.check_precision, "fp8", "cuda") == (
        "precision=fp8: needs the package torchao, which is not installed; try pip install 'ptdbench[fp8]', or bf16"
    )
    monkeypatch.setattr(checks.fp8, "is_installed", lambda: True)
    checks.check_precision("fp8", "cuda")
    gpu("NVIDIA A100-SXM4-80GB", 8, 0)
    assert unfit(checks.check_gpu_precision, "fp8", GPU) == (
        "precision=fp8: NVIDIA A100-SXM4-80GB (compute capability 8.0) has no FP8 units; try fp16, bf16"
    )
    for name, capability in (("NVIDIA L4", (8, 9)), ("NVIDIA H200", (9, 0))):
        gpu(name, *capability)
        checks.check_gpu_precision("fp8", GPU)


def test_fp8_on_amd_goes_by_the_architecture(gpu, monkeypatch):
    gpu("AMD Instinct MI250X", 9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    architecture = "gfx90a:sramecc+:xnack-"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=architecture))
    assert (
        unfit(checks.check_gpu_precision, "fp8", GPU) == "precision=fp8: AMD Instinct MI250X has no FP8 units; try bf16"
    )
    architecture = "gfx942:sramecc+:xnack-"
    checks.check_gpu_precision("fp8", GPU)


def test_a_cpu_is_not_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: pytest.fail("asked"))
    checks.check_gpu_precision("bf16", torch.device("cpu"))
