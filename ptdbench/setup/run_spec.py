"""Specification of a run: every object that its configuration names, built and checked against the others.

Specifying a run starts no process and writes nothing. The process that opens a run does it once, to find all problems
before anything happens, and keeps a summary in the record; the ranks :func:`build` it from there.
"""

import gc
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.checkpoints.checkpoint_dir import Manifest
from ptdbench.launch.world import LAUNCHERS, THIS_MACHINE, Place, World
from ptdbench.models.materialize import parameter_count
from ptdbench.models.protocol import module_of, only_loss
from ptdbench.parallel.dims import BatchPlan, Dims
from ptdbench.parallel.precision import FP8_MULTIPLE, FP8_RECIPES, FP8_SMALLEST, fp8_layers, gathers_fp8
from ptdbench.problems import ErrorCollector, Problem, broken, require
from ptdbench.profiling.events import NCCL_BUFFERS
from ptdbench.records.schema import Draft, Written
from ptdbench.setup import checks, choices, training_spec
from ptdbench.setup.config import RANKS_WITHOUT_GPU, Config, Slurm
from ptdbench.setup.training_spec import TrainingSpec
from ptdbench.terminal import command, plural
from ptdbench.virtual.machine import MOST_GPUS, Machine


@dataclass(frozen=True)
class RunSpec:
    """The specification of one run."""

    config: Config  #: The run's configuration.
    device_type: str  #: ``cpu`` or ``cuda``.
    backend: str  #: ``gloo`` or ``nccl``.
    world_size: int  #: Number of ranks.
    training: TrainingSpec | None  #: What the workload trains; ``None`` if it does not train.
    virtual: Machine | None = None  #: The machine with virtual GPUs; ``None`` for real devices.

    @property
    def backends(self) -> str:
        """The backend by kind of device: NCCL cannot all-reduce the norm of gradients in host memory."""
        offloads = self.config.general.offload != "none"
        return "cpu:gloo,cuda:nccl" if self.backend == "nccl" and offloads else self.backend

    @property
    def is_on_host(self) -> bool:
        """True if the training state is in host memory."""
        return self.device_type == "cpu" or self.config.general.offload != "none"

    @property
    def nccl_bytes(self) -> int:
        """GPU memory of NCCL's buffers on a training rank, in bytes, by their documented size."""
        if self.training is None or self.backend != "nccl":
            return 0
        return self.training.layout.dims.communicators * NCCL_BUFFERS

    def ranks_here(self, world: World | None) -> int:
        """Return the number of ranks on this machine; with virtual GPUs that is all of them, whatever their node."""
        if self.virtual:
            return len(self.virtual.ranks) if self.virtual.ranks else self.world_size
        return world.local_size if world else self.world_size

    @property
    def summary(self) -> Draft:
        """The fields of the record that the specification determines; with a ``layout`` if the run trains."""
        fields: Draft = {"world_size": self.world_size, **({"kind": "virtual"} if self.virtual else {})}
        if (training := self.training) is None:
            fields |= dict.fromkeys(("model", "parallel", "global_batch", "precision", "kernels"))
        else:
            layout, tokens = training.layout.as_dict(), training.data.tokens_per_sample
            parameters = parameter_count(module_of(training.model))
            fields |= {"parameters": parameters, "tokens_per_sample": tokens, "layout": layout}
        return fields

    def device(self, local_rank: int) -> torch.device:
        """Return the device of a rank: the GPU with its number, or the only one that its launcher lets it see."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else local_rank)


def specify(config: Config, world: World | None, gpus: int | None = None) -> RunSpec:
    """Specify a run.

    Args:
        config: The run's configuration.
        world: This process's place among ranks that a launcher started or will start; ``None`` if the run will start
            its own ranks.
        gpus: GPUs per node; ``None`` for those that torch finds here, or with virtual GPUs one per rank.

    Raises:
        ConfigError: With all problems, as far as one can be checked in the presence of another.
    """
    errors = ErrorCollector()
    if virtual := errors.catch(choices.virtual, config):
        errors.catch(lambda: require(*_unfit_for_virtual(config, world)))
        ranks = errors.catch(lambda: config.cluster.ranks_per_node)  # a virtual node has one GPU per rank
        gpus = ranks if isinstance(ranks, int) else RANKS_WITHOUT_GPU
    gpus = torch.cuda.device_count() if gpus is None else gpus
    device_type = _device_type(config, gpus)
    available = gpus if device_type == "cuda" else RANKS_WITHOUT_GPU
    world_size = partial(_world_size, config, world, available=available, is_virtual=virtual is not None)
    for part in ("general", "cluster", "checkpoint", "profile", "sweep"):
        errors.catch(getattr, config, part)
    errors.catch(lambda: require(*_contradictions(config, world, gpus, virtual is not None)))
    errors.catch(checks.check_precision, config.resolved.get("precision"), device_type)
    if virtual:
        precision = config.resolved.get("precision")
        errors.catch(checks.check_capability, precision, virtual.gpu_name, virtual.capability)
        errors.catch(checks.check_kernels, config.call("virtual").name, virtual.capability)
    workload = errors.catch(choices.build, config, "workload")
    trains = workload is not None and workload.trains
    errors.catch(_check_logger, config, trains)
    on_gpu = device_type == "cuda"
    nodes = _nodes(config, world)
    trained = errors.catch(training_spec.specify, config, world_size, nodes=nodes, on_gpu=on_gpu) if trains else None
    size = trained.layout.dims.world_size if trained else errors.catch(world_size, lambda available: available)
    if virtual and size:
        errors.catch(virtual.check_ranks, size)
    backend = _backend(config, device_type)
    if trained:
        errors.catch(lambda: require(*_unclassified(config, trained)))
        errors.catch(_check_fp8, config, trained)
        errors.catch(trained.check_backend, backend, device_type)
    if workload and size:
        errors.catch(workload.check, size, device_type, backend)
    errors.close()
    assert workload and size  # noqa: PT018 - one fact
    return RunSpec(config, device_type, backend, size, training=trained, virtual=virtual)


def build(config: Config, layout: BatchPlan | None, world: World) -> RunSpec:
    """Build a rank's specification of a run that another process has specified; nothing is checked again.

    The ``layout`` is that of its record; ``None`` if it does not train. The first rank counts FLOPs.
    """
    virtual = choices.virtual(config)
    device_type = _device_type(config, world.local_size if virtual else torch.cuda.device_count())
    on_gpu, counts = device_type == "cuda", world.is_first and not virtual
    training = training_spec.build(config, layout, on_gpu=on_gpu, counts=counts) if layout else None
    return RunSpec(config, device_type, _backend(config, device_type), world.size, training, virtual)


def place(config: Config, size: int) -> Place:
    """Return the pretended place of local ranks; raises ConfigError if virtual GPUs cannot be built here."""
    if (machine := choices.virtual(config)) is None:
        return THIS_MACHINE
    nodes = 1 if config.cluster.nodes == "auto" else config.cluster.nodes
    return Place(nodes, machine.ranks and sorted(machine.ranks), machine.environment(size // nodes))


def summarize(config: Config, world: World | None, gpus: int | None = None) -> Draft:
    """Specify a run, and keep only its summary; arguments and errors are those of :func:`specify`.

    The run is refused if its training state cannot fit into memory. A model without ``reset`` is built whole in host
    memory, which the ranks need: it is freed when this returns.
    """
    spec = specify(config, world, gpus)
    check_memory(spec, world, is_elsewhere=gpus is not None)
    summary = spec.summary
    in_memory = spec.training and any(not p.is_meta for p in module_of(spec.training.model).parameters())
    del spec
    if in_memory:
        gc.collect()  # such a model may contain reference cycles, and this process will only wait from now on
    return summary


def check_memory(spec: RunSpec, world: World | None, is_elsewhere: bool = False) -> None:
    """Compare a run's training state with the available memory; see :func:`checks.check_memory`.

    A GPU is queried only in a rank, which has a ``world``, because that initializes CUDA. ``is_elsewhere`` says that a
    cluster job will execute the run.
    """
    reserve, cluster = spec.config.general.memory_reserve, spec.config.cluster
    if spec.training is None or reserve is None:
        return
    ranks, room = spec.ranks_here(world), None
    if is_elsewhere:
        room = checks.in_job(cluster, ranks) if isinstance(cluster, Slurm) and spec.is_on_host else None
    elif world or spec.is_on_host or spec.virtual:
        room = memory(spec, reserve, ranks, world.local_rank if world else 0, running=world is not None)
    if room:
        checks.check_memory(spec.training, room)


def memory(spec: RunSpec, reserve: float, ranks: int, local_rank: int, *, running: bool) -> checks.Room:
    """Return the memory for the training state of a run: of this machine, or of a GPU, which initializes CUDA.

    The fraction ``reserve`` is kept free. ``ranks`` ranks are on this machine, and may be ``running`` already.
    """
    if spec.is_on_host:
        return checks.on_host(ranks, reserve, running=running)
    if spec.virtual:
        gpu = spec.virtual.gpu
        return checks.of_gpu(gpu.memory - gpu.context, gpu.memory, reserve, spec.nccl_bytes, f"virtual {gpu.name}")
    return checks.on_gpu(spec.device(local_rank), reserve, spec.nccl_bytes)


def _unfit_for_virtual(config: Config, world: World | None) -> Iterator[Problem]:
    """Yield problems of virtual GPUs on a cluster, on the CPU, or for ranks that a launcher, not a job, starts."""
    call, cluster, general = config.call("virtual"), config.cluster, config.general
    count, ranks = cluster.ranks_per_node, call.options.get("ranks")
    launcher = world.launcher if world and not isinstance(cluster, Slurm) and not world.started_by.has_parent else ""
    some = ranks is not None
    saves = bool(config.checkpoint.every_steps or general.resume)
    is_other_work = config.call("workload").name != "train"
    return broken([
        (config.resolved.get("device") == "cpu", "device", "cpu", f"virtual={call.name} is a GPU",
         "try auto, or virtual=none"),
        (some and saves, "virtual.ranks", ranks, "a checkpoint needs all ranks",
         "try null, or omit checkpoint.every_steps and resume"),
        (some and bool(config.eval.every), "virtual.ranks", ranks, "an evaluation needs all ranks",
         "try null, or omit eval.every"),
        (some and is_other_work, "virtual.ranks", ranks, "only training can run on some of the ranks",
         "try null, workload=train and check=false"),
        (isinstance(cluster, Slurm), "cluster", cluster.name,
         f"virtual={call.name} runs on this machine, whatever its nodes", "omit cluster"),
        (count != "auto" and count > MOST_GPUS, "cluster.ranks_per_node", count,
         f"torch is compiled for at most {MOST_GPUS} GPUs per node", f"try {MOST_GPUS} or fewer on more cluster.nodes"),
        (bool(launcher), "virtual", call.name,
         f"ranks with virtual GPUs are started by ptdbench, and {launcher} has started these",
         f"run it without {launcher}"),
    ])  # fmt: skip


def _device_type(config: Config, gpus: int) -> str:
    """Return ``cpu`` or ``cuda``; not from ``config.general``, as ranks can be counted despite a wrong root option."""
    return "cpu" if config.resolved.get("device") == "cpu" or gpus == 0 else "cuda"


def _backend(config: Config, device_type: str) -> str:
    chosen = str(config.resolved.get("backend"))
    return {"cpu": "gloo", "cuda": "nccl"}[device_type] if chosen == "auto" else chosen


def _contradictions(config: Config, world: World | None, gpus: int, is_virtual: bool) -> Iterator[Problem]:
    """Yield options that contradict each other, this machine's GPUs, or the launcher of the ranks."""
    general, cluster, wanted = config.general, config.cluster, config.train.micro_batch
    device_type, ranks, launcher = _device_type(config, gpus), cluster.ranks_per_node, world.launcher if world else ""
    shared = gpus == 1 and bool(world or general.backend == "gloo")  # a launcher's ranks have agreed on their devices
    requeues = isinstance(cluster, Slurm) and cluster.requeue
    return broken([
        (general.device == "cuda" and gpus == 0, "device", "cuda", "this machine has no GPU that torch can use",
         "try auto, cpu"),
        (general.backend == "nccl" and device_type == "cpu", "backend", "nccl",
         "NCCL moves data between GPUs, and the ranks of this run have none", "try auto, gloo"),
        (device_type == "cuda" and ranks != "auto" and ranks > gpus and not shared, "cluster.ranks_per_node", ranks,
         f"must not exceed the number of GPUs, {gpus}: one rank, one GPU", f"try auto, {gpus}, or device=cpu"),
        (requeues and config.checkpoint.every_steps is None, "cluster.requeue", True,
         "a requeued run continues from its last checkpoint, and this one saves none", "give checkpoint.every_steps"),
        (general.objective != "throughput" and config.eval.every is None, "objective", general.objective,
         "is measured on held-out samples, and eval.every=null never evaluates",
         f"try eval.every={config.train.steps}"),
        (wanted == "best" and is_virtual, "train.micro_batch", wanted,
         "is found by timing runs, and virtual GPUs take no time", "try max"),
        (wanted in ("max", "best") and launcher in LAUNCHERS, "train.micro_batch", wanted,
         f"is found by short runs, each with fresh ranks, and {launcher} has started these once",
         f"start it with plain python or cluster=slurm, or give the number that {command('plan')} finds"),
        (config.profile.trace and not config.profile.steps, "profile.trace", True,
         "traces profiled steps, and profile.steps=0 profiles none", "try profile.steps=5"),
    ])  # fmt: skip


def _check_logger(config: Config, trains: bool) -> None:
    name, workload = config.call("logger").name, config.call("workload").name
    if logger := choices.build(config, "logger"):
        package = logger.package
        require(*broken([
            (not trains, "logger", name, f"logs the curves of training, and workload={workload} does not train",
             "omit it"),
            (importlib.util.find_spec(package) is None, "logger", name,
             f"needs the package {package}, which is not installed", f"try pip install 'ptdbench[{package}]'"),
        ]))  # fmt: skip


def _unclassified(config: Config, training: TrainingSpec) -> Iterator[Problem]:
    """Yield a problem of accuracy as the objective of samples without classes, or of a model without outputs."""
    targets, is_wanted = training.data.example()[1], config.general.objective == "held_out_accuracy"
    data, model = config.call("data").name, config.call("model").name
    return broken([
        (is_wanted and (targets.dim() != 1 or targets.is_floating_point()), "objective", "held_out_accuracy",
         f"the samples of data={data} have no classes", "try held_out_loss"),
        (is_wanted and only_loss(training.model), "objective", "held_out_accuracy",
         f"forward() of model={model} takes targets and returns a loss alone",
         "try held_out_loss, or give targets the default None"),
    ])  # fmt: skip


def _check_fp8(config: Config, training: TrainingSpec) -> None:
    """Refuse fp8 where it cannot be applied, or would convert no layer, so that the run would be in bf16."""
    name, dims = str(config.resolved.get("precision")), training.layout.dims
    is_sharded = training.strategy.shards(dims)
    if name not in FP8_RECIPES:
        return
    is_gathered, layers = gathers_fp8(name, sharded=is_sharded), training.model.layers()
    if is_gathered and (offload := config.resolved.get("offload")) != "none":
        rule = f"is not available with offload={offload}: ranks agree on scales on the GPU, where they gather"
        require(Problem("precision", name, rule, "try fp8"))
    converted = fp8_layers(layers, name, sharded=is_sharded)
    if is_gathered and (uneven := [layer.out_features for layer in converted if layer.out_features % dims.shards]):
        rule = f"FSDP gathers shards of equal size in fp8, and {dims.shards} do not divide the {uneven[0]} outputs"
        require(Problem("precision", name, f"{rule} of a linear layer", "try fp8, or another parallel.shard"))
    if not converted:
        rule = f"no layer of model={config.call('model').name} has an nn.Linear of at least {FP8_SMALLEST} features, "
        rule += f"both multiples of {FP8_MULTIPLE}"
        require(Problem("precision", name, rule, "try bf16"))


def _world_size(
    config: Config, world: World | None, rule: Callable[[int], int], available: int, *, is_virtual: bool
) -> int:
    """Return the number of ranks; those of ``world`` must match what was requested.

    ``rule`` maps the number of ``available`` devices to the number of ranks, if none was requested.
    """
    nodes, ranks = config.cluster.nodes, config.cluster.ranks_per_node
    if world:
        require(*broken([
            (ranks not in ("auto", world.local_size), "cluster.ranks_per_node", ranks,
             f"{world.launcher} started {world.local_size} ranks on this node", f"try auto, {world.local_size}"),
            (nodes != "auto" and world.nodes not in (None, nodes), "cluster.nodes", nodes,
             f"{world.launcher} started ranks on {plural(world.nodes or 0, 'node')}", f"try auto, {world.nodes}"),
        ]))  # fmt: skip
        return world.size
    if nodes not in ("auto", 1) and not is_virtual:
        remedy = "try 1, cluster=slurm, or srun, mpirun or torchrun on every node"
        require(Problem("cluster.nodes", nodes, "this machine is one node", remedy))
    count = 1 if nodes == "auto" else nodes
    return rule(count * available) if ranks == "auto" else count * ranks


def _nodes(config: Config, world: World | None) -> int:
    """Return the number of nodes; if the launcher does not say, assume as many ranks on each node as on this one."""
    if world:
        return world.nodes or max(world.size // world.local_size, 1)
    nodes = config.resolved["cluster"].get("nodes", "auto")  # not from config.cluster, where another may be wrong
    return nodes if isinstance(nodes, int) and nodes > 0 else 1


_DEGREES = (*Dims.order(), *(name for name in Dims.rows() if name not in Dims.order()))


def change_of_shape(checkpoint: Manifest, world_size: int, layout: Mapping[str, Any]) -> str | None:
    """Describe a changed shape: ``2 ranks (shard=2) instead of 4 ranks (replicate=2 shard=2)``; ``None`` if equal."""
    segments = checkpoint.facts.get("segments") or [{}]
    was: Mapping[str, Any] = segments[-1].get("layout") or {}
    if checkpoint.world_size == world_size and all(was.get(name, layout[name]) == layout[name] for name in _DEGREES):
        return None
    return f"{_shape_described(world_size, layout)} instead of {_shape_described(checkpoint.world_size, was)}"


def require_same_shape(directory: Path, summary: Written, allowed: bool) -> None:
    """Raise ConfigError for a run that would resume in place with another shape, unless that is ``allowed``.

    Any layout can load a checkpoint, but not always the random generators of each single rank. The numbers may
    therefore differ from then on, and times are no longer comparable.
    """
    if allowed or "layout" not in summary or (checkpoint := checkpoint_dir.latest_manifest(directory)) is None:
        return
    if changed := change_of_shape(checkpoint, summary["world_size"], summary["layout"]):
        rule = f"{directory} would continue with {changed}, which may change its numbers"
        remedy = "start it as before, set reshape=true, or add options to start a new run from it"
        require(Problem("reshape", False, rule, remedy))


def _shape_described(world_size: int, layout: Mapping[str, Any]) -> str:
    degrees = " ".join(f"{name}={layout[name]}" for name in _DEGREES if layout.get(name, 1) > 1)
    return plural(world_size, "rank") + (f" ({degrees})" if degrees else "")
