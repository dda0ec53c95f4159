"""What a run will be, and everything that forbids it."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from ptdbench.launch.world import THIS_MACHINE, World
from ptdbench.models.toy import Toy
from ptdbench.parallel.dims import Dims
from ptdbench.problems import ConfigError
from ptdbench.setup import run_spec, training_spec
from ptdbench.setup.runs import Shape
from ptdbench.setup.training_spec import Flops
from tests.conftest import read
from tests.models.assembled import assembled
from tests.refusals import Abridged, refusal_of
from tests.workloads import made_task


def make(*overrides: str, device: str = "cpu", world: World | None = None) -> run_spec.RunSpec:
    return run_spec.specify(read(f"device={device}", *overrides), world)


def refused(*overrides: str, device: str = "cpu", world: World | None = None) -> list[str]:
    return refusal_of(make, *overrides, device=device, world=world).splitlines()


def rank_of(size: int, local_size: int | None = None) -> World:
    return World(0, size, 0, local_size or size, "torchrun")


class TestSound:
    def test_the_defaults_are_two_replicas_over_gloo_and_the_model_costs_nothing_yet(self):
        made = make()
        assert (made.device_type, made.backend) == ("cpu", "gloo")
        assert (made.training.layout.dims, made.training.layout.micro_batch) == (Dims(replicate=2), 8)
        assert made.device(1) == torch.device("cpu")
        made = make("parallel=fsdp", "offload=optimizer_and_weights")
        assert made.backends == "gloo"
        assert replace(made, backend="nccl").backends == "cpu:gloo,cuda:nccl"
        assert replace(make("parallel=fsdp"), backend="nccl").backends == "nccl"
        made = make("model=gpt_1t")
        assert made.summary["parameters"] > 1e12
        assert all(tensor.is_meta for tensor in made.training.model.state_dict().values())

    def test_flops_are_the_models_own_or_have_a_reason(self, monkeypatch):
        training = make("model=toy", "model.inputs=6", "model.width=5", "model.outputs=4", "model.layers=3").training
        assert Flops.of(training.model) == Flops(4 * 6 * 5 + 6 * 5 * 5 + 6 * 5 * 4, masked=0.0)
        monkeypatch.delattr(Toy, "masked_flops")
        assert Flops.of(make("model=toy").training.model).masked is None
        flops = Flops.of(make(*custom("unfathomable")).training.model)
        assert flops.per_sample is None
        assert "meta" in flops.reason

    @pytest.mark.parametrize("words", [("parallel=pdp", "train.micro_batch=2"), ("workload=hello",)])
    def test_a_rank_builds_what_another_process_has_specified(self, words, monkeypatch):
        asked = read("device=cpu", "cluster.ranks_per_node=4", *words)
        specified = run_spec.specify(asked, None)
        for check in ("_check_data", "_check_observed", "_optimizer"):
            monkeypatch.setattr(training_spec, check, None)
        layout = specified.training and specified.training.layout
        first, other = (run_spec.build(asked, layout, World(rank, 4, rank, 4, "local")) for rank in (0, 1))
        assert (first.device_type, first.backends, first.world_size) == ("cpu", "gloo", 4)
        assert first.summary == specified.summary
        if layout:
            assert first.training.flops.per_sample > 0
            assert other.training.flops.per_sample is None

    def test_the_ranks_of_a_launcher_are_taken_as_they_are(self):
        assert make(world=rank_of(4)).training.layout.replicas == 4
        assert make("cluster.ranks_per_node=2", world=rank_of(4, local_size=2)).training.layout.replicas == 4


RING = "parallel=ddp parallel.context=2 parallel.context_method=ring"
CLASSIFIER = "model=custom model._target_=tests.setup.test_run_spec.Classifier data.inputs=4 data.outputs=4"

#: What is typed, of which the last word is refused, and why.
TOLD = {
    "model.heads=3": "must divide width=128; try 1, 2, 4",
    "train.global_batch=17": "must be a multiple of the number of data-parallel replicas, 2; try 16, 18",
    "parallel=pdp cluster.ranks_per_node=8 parallel.pipeline=8": "… the model's 4 layers; try 2, 4",
    "data.path=/no/such/books": "there is no such file or folder",
    "data=synthetic_images": "does not suit model=gpt_tiny: …",
    "parallel=fsdp parallel.reshard_after_forward=half": "must be true or false or a whole number",
    "kernels=torch model=resnet18 parallel.sync_batchnorm=true": "… takes tensors of GPUs only; try false, …",
    "kernels=torch parallel=tp compile=whole": "is one graph, … outside of graphs; try layers, or kernels=fused",
    "cluster.nodes=2": "this machine is one node; try 1, cluster=slurm, or srun, …",
    "data.sequence_length=${model.length}": "… does not exist; give data.sequence_length a value, or …",
    "data.sequence_length=64": "must be 128, that of model=gpt_tiny, for which …; try model.sequence_length=64",
    "model=resnet18 optimizer=muon": "is for matrices, and model=resnet18 has none …; try adamw",
    "cluster=slurm cluster.requeue=true": "… continues from its last checkpoint, …; give checkpoint.every_steps",
    "model=toy objective=held_out_loss": "… held-out samples, and eval.every=null never evaluates; try eval.every=60",
    "profile.steps=0 profile.trace=true": "traces profiled steps, and … none; try profile.steps=5",
    "eval.every=5": "data=text has no held-out samples; try null, or give data.held_out",
    "data.held_out=0.1 eval.every=5 objective=held_out_accuracy": "… data=text have no classes; try held_out_loss",
    "virtual=h100 device=cpu": "virtual=h100 is a GPU; try auto, or virtual=none",
    **{
        f"virtual=h100 {layout} backend=gloo": f"{rule}; try nccl, or device=cpu"
        for layout, rule in (
            ("parallel=pdp", "cannot send GPU tensors, as pipeline stages do"),
            ("workload=p2p", "cannot send GPU tensors"),
            *(
                (layout, f"has no functional all-gather of GPU tensors, needed by {user}")
                for layout, user in (
                    (RING, "ring attention"),
                    ("parallel=tp parallel.sequence=true", "sequence parallelism"),
                    ("parallel=tp model=moe_tiny", "a mixture of experts under tensor parallelism"),
                    (f"parallel=tp {CLASSIFIER}", "tensor-parallel logits"),
                    ("parallel=fsdp optimizer=muon", "the optimizer's updates of sharded matrices"),
                    ("parallel=tp optimizer=muon", "the optimizer's updates of sharded matrices"),
                )
            ),
        )
    },
    "virtual=h100 train.micro_batch=best": "is found by timing runs, …; try max",
    **{
        f"virtual=h100 virtual.ranks={ranks}": "… has 2 ranks; try numbers from 0 to 1, or null for all"
        for ranks in ("[0,2]", "[]")
    },
    **{
        f"virtual=h100 data.held_out=0.1 {what}.every{unit}=1 virtual.ranks=[0]": f"… null, or omit {what}.every{rest}"
        for what, unit, rest in (("checkpoint", "_steps", "_steps and resume"), ("eval", "", ""))
    },
    "virtual=h100 cluster=slurm": "virtual=h100 runs on this machine, whatever its nodes; omit cluster",
    "virtual=h100 train.global_batch=128 cluster.ranks_per_node=128": "… at most 120 …; try 120 or fewer on more …",
    "virtual=a100 virtual.gpu.capability=7.5 precision=bf16": "virtual NVIDIA A100… 7.5) has no BF16 …; try fp16",
}


class TestRefused:
    @pytest.mark.parametrize(("typed", "rule"), TOLD.items())
    def test_each_refusal_is_one_line(self, typed, rule):
        refusal = refused(*typed.split(), device="auto" if "virtual" in typed else "cpu")
        assert refusal == [Abridged(f"{typed.split()[-1]}: {rule}")]

    def test_a_job_to_submit_has_no_virtual_gpus(self):
        refusal = refused("virtual=h100", "cluster=slurm", device="auto", world=Shape(1, 2, 0, None).world)
        assert refusal == [Abridged("cluster=slurm: virtual=h100 runs on this machine, …; omit cluster")]

    def test_gloo_is_accepted_for_layouts_that_it_can_send(self):
        for layout in (
            "parallel=ddp parallel.context=2", "parallel=tp", "parallel=fsdp", "model=moe_tiny parallel=ep",
            "optimizer=muon", "optimizer=muon parallel=fsdp offload=optimizer_and_weights",
        ):  # fmt: skip
            assert make("virtual=h100", "backend=gloo", *layout.split(), device="auto").backend == "gloo"
        assert make("virtual=h100", "parallel=pdp", device="auto").backend == "nccl"
        assert make("backend=gloo", *RING.split()).device_type == "cpu"

    def test_cuda_and_nccl_need_a_gpu(self):
        assert refused("device=cuda", "backend=nccl") == [
            "device=cuda: this machine has no GPU that torch can use; try auto, cpu",
            "backend=nccl: NCCL moves data between GPUs, and the ranks of this run have none; try auto, gloo",
        ]

    def test_fp8_of_nothing(self, monkeypatch):
        monkeypatch.setattr(run_spec.checks, "check_precision", lambda *_: None)  # as on a GPU with FP8 units
        on_host = ("model=gpt_small", "parallel=fsdp", "offload=optimizer_and_weights")
        uneven = ("model=gpt_small", "parallel=fsdp", "cluster.ranks_per_node=5", "train.global_batch=5")
        for precision, words, rule in (
            ("fp8", ["model=gpt_tiny"], "no layer of model=gpt_tiny … at least 512 features, … of 16; try bf16"),
            ("fp8_tensorwise", on_host, "is not available with offload=optimizer_and_weights: …; try fp8"),
            ("fp8_tensorwise", uneven, "… 5 do not divide the 2304 outputs …; try fp8, or another parallel.shard"),
        ):
            assert refused(f"precision={precision}", *words) == [Abridged(f"precision={precision}: {rule}")]
        make("precision=fp8", *on_host)

    def test_more_ranks_than_gpus(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        refusal = "cluster.ranks_per_node=4: must not exceed the number of GPUs, 2: …; try auto, 2, or device=cpu"
        assert refused("cluster.ranks_per_node=4", device="auto") == [Abridged(refusal)]
        made = make(device="auto")
        assert (made.world_size, made.backend) == (2, "nccl")

    def test_another_world_than_the_launcher_started_or_the_layout_divides(self):
        refusal = "cluster.ranks_per_node=3: torchrun started 4 ranks on this node; try auto, 4"
        assert refused("cluster.ranks_per_node=3", world=rank_of(4)) == [refusal]
        refusal = "parallel.pipeline=2: replicate(auto) x pipeline(2) must equal the number of ranks, 3; try 3"
        assert refused("parallel=pdp", "parallel.pipeline=2", world=rank_of(3)) == [refusal]

    def test_everything_at_once_as_far_as_it_can_be_judged(self):
        wrong = ["precision=fp4", "train.global_batch=17", "model.heads=3", "optimizer.lr=-1"]
        names = ["precision", "model.heads", "optimizer"]
        assert [line.partition("=")[0] for line in refused(*wrong)] == [*names, "train.global_batch"]
        names.insert(1, "cluster.cpus_per_rank")  # with which the ranks cannot be counted
        assert [line.partition("=")[0] for line in refused(*wrong, "cluster.cpus_per_rank=0")] == names
        surprising = ["model._target_=5", "optimizer.lr=[1,2]", "train=5", "+unknown.option=1"]
        names = ["unknown", "train", "model._target_", "optimizer.lr"]
        assert [line.partition("=")[0] for line in refused(*surprising)] == names

    @pytest.mark.parametrize("batch", [16, 18])
    def test_offered_batches_are_accepted(self, batch):
        make(f"train.global_batch={batch}")


def test_data_without_samples_are_refused():
    target = "builtins.object"
    options = ("data=synthetic_vectors", "~data.inputs", "~data.outputs", "~data.seed", f"data._target_={target}")
    refusal = f"data._target_={target}: has neither samples(start, stop) nor __len__ and __getitem__; …"
    assert refused("model=toy", *options) == [Abridged(refusal)]


class TestUpdatesOfTheUser:
    @pytest.mark.parametrize(("overrides", "refusal"), [
        ((f"optimizer._target_={__name__}.Rateless",),
         f"optimizer._target_={__name__}.Rateless: has parameter groups without lr, …; give every group an lr"),
        (("optimizer.lr=-1",), "optimizer=(its options): cannot be built: Invalid learning rate: -1"),
        (("optimizer._target_=torch.optim.Adafactor", "optimizer.lr=0.1", "parallel=fsdp"),
         "optimizer._target_=Adafactor: does not support sharded weights in torch; try adamw, or parallel=ddp"),
        (("optimizer._target_=torch.optim.SGD", "lr_schedule._target_=types.SimpleNamespace"),
         "lr_schedule._target_=types.SimpleNamespace: has no factor(); write it as ptdbench.optim.…"),
    ])  # fmt: skip
    def test_optimizer_that_cannot_step_is_refused(self, overrides, refusal):
        without = ("~optimizer.momentum", "~optimizer.weight_decay", "~lr_schedule.warmup_steps")
        assert refused("model=toy", "optimizer=sgd", *without, *overrides) == [Abridged(refusal)]

    @pytest.mark.parametrize(
        ("name", "refusal"), [("Counter", "steps as int"), ("GroupCounter", "k in its parameter groups")]
    )
    def test_optimizer_with_unsavable_state_is_refused(self, name, refusal):
        typed = ("model=toy", "optimizer=sgd", "~optimizer.momentum", "~optimizer.weight_decay",
                 f"optimizer._target_={__name__}.{name}")  # fmt: skip
        make(*typed)
        rule = f"keeps {refusal}, but checkpoints hold only tensors in its state"
        refusal = f"optimizer={name}: {rule}; try adamw, sgd, or checkpoint.every_steps=null"
        assert refused(*typed, "checkpoint.every_steps=5") == [refusal]


def by_method() -> nn.Module:
    class Layer(nn.Linear):
        run = nn.Linear.forward

    def forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer.run(inputs)
        return self.head(inputs)

    return assembled(forward, layers=nn.ModuleList(Layer(4, 4) for _ in range(3)), head=nn.Linear(4, 4))


def counts() -> nn.Module:
    def forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        for layer in getattr(self, "layers", [self.linear]):
            inputs = layer(inputs)
        return inputs * self.passes

    def counting(**parts: Any) -> nn.Module:
        return assembled(forward, passes=nn.Buffer(torch.zeros(())), linear=nn.Linear(4, 4), **parts)

    layer = counting()
    return counting(layers=nn.ModuleList(deepcopy(layer) for _ in range(3)))


def custom(name: str) -> tuple[str, ...]:
    """What is typed for a model of this file."""
    return ("model=custom", f"model._target_={__name__}.{name}", *VECTORS)


class TestModelsOfTheUser:
    @pytest.mark.parametrize(("target", "refusal"), [
        ("no_such_package.Net", "._target_=no_such_package.Net: cannot be imported: No module named"),
        ("tests.setup.test_run_spec.mood", "._target_=tests.setup.test_run_spec.mood: tests.setup.test_run_spec has"),
        ("tests.setup.test_run_spec.moody", "=(its options): cannot be built: not today"),
        ("tests.setup.test_run_spec.mute", "=(its options): cannot be built: (no message: the exception's own "),
    ])  # fmt: skip
    def test_unbuildable_model_is_refused(self, target, refusal):
        assert refused("model=custom", f"model._target_={target}", *VECTORS) == [Abridged(f"model{refusal}…")]

    def test_options_that_refer_to_another_groups_name_it(self):
        refusal = "model=(its options): refer to data.sequence_length, which is not among the options; try another data"
        assert refused("model=hf_gpt2_tiny", "data=synthetic_images", "data.image_size=8", "data.classes=10") == [
            refusal
        ]

    def test_a_model_of_one_input_is_not_offered_several(self):
        (refusal,) = refused("model=custom", "model._target_=torch.nn.Linear", "+model.in_features=3",
                          "+model.out_features=4", *VECTORS)  # fmt: skip
        assert refusal.endswith("; its forward takes input")

    @pytest.mark.parametrize("target", ["no_such_package.Net", "torch.nn.Linear"])
    def test_class_under_another_models_options_is_refused(self, target):
        """What a person tries first: the class without ``model=custom``."""
        refusal = (
            f"model._target_={target}: … the options of model=toy; try model=custom model._target_={target}, which …"
        )
        assert refused("model=toy", f"model._target_={target}")[-1] == Abridged(refusal)

    def test_model_without_accuracy_is_refused_as_objective(self):
        options = (f"model._target_={made_task.__name__}.OnlyLoss", "eval.every=5", "objective=held_out_accuracy")
        (line,) = refused(*made_task.TASK, *options)
        rule = "forward() of model=OnlyLoss takes targets and returns a loss alone"
        assert line.startswith(f"objective=held_out_accuracy: {rule}; try held_out_loss")

    @pytest.mark.parametrize(("options", "refusal"), [
        (["parallel=fsdp"], "parallel.shard=auto: … FSDP drops what it has gathered; try parallel=ddp"),
        (["parallel=tp", "parallel.tensor=1", "precision=fp16"],
         "precision=fp16: … it has narrow copies of them; try fp32"),
        (["activations=recompute", "parallel=ddp"],
         "activations=recompute: … it runs again in the backward pass; try keep, offload"),
        (["parallel=pdp"], "parallel.pipeline=auto: … each stage runs it for each micro-batch; try parallel=ddp"),
    ])  # fmt: skip
    def test_weights_changed_in_forward_exclude_options(self, options, refusal):
        make(*custom("momentum"), "parallel=ddp", "parallel.optimizer=zero1")
        rule = "the model's forward pass changes weights in place, such as 0.slow.weight, and"
        assert refused(*custom("momentum"), *options) == [refusal.replace("…", rule)]

    @pytest.mark.parametrize(("options", "refusal"), [
        (["activations=recompute"], "it is applied to calls; try calling layer(x), or keep"),
        (["compile=layers"], "calls are compiled; try calling layer(x), or whole"),
        (["parallel=fsdp"], "FSDP has them in shards then; try calling layer(x), or parallel=ddp"),
    ])  # fmt: skip
    def test_layers_called_by_another_method_exclude_options(self, options, refusal):
        make(*custom("by_method"), "compile=whole", "parallel=ddp")
        (line,) = refused(*custom("by_method"), *options)
        assert line.endswith(f", such as layers.0.weight, and {refusal}")

    @pytest.mark.parametrize(("options", "refusal"), [
        (["activations=recompute", "compile=whole"], "a compiled layer runs again on changed ones"),
        (["compile=layers"], "a compiled backward pass may read what it has changed"),
        (["parallel=pdp"], "no stage holds them"),
    ])  # fmt: skip
    def test_buffers_changed_in_forward_exclude_options(self, options, refusal):
        make(*custom("counts"), "parallel=fsdp", "activations=recompute", "precision=bf16")
        lines = refused(*custom("counts"), *options)
        assert Abridged(f"…the model's forward pass changes buffers…{refusal}…") in lines

    @pytest.mark.parametrize(("kind", "options", "refusal"), [
        ("regularized", ["parallel=fsdp"], "parallel.shard=auto: the model uses weights of a layer while"),
        ("regularized", ["parallel=ddp"], None),
        ("empty", ["parallel=fsdp"], "parallel.shard=2: module.odd is empty, which fully_shard does not "),
        ("empty", ["parallel=ddp"], None),
        ("complex", ["parallel=ddp"], "optimizer.fused=true: module.odd is complex, and fused kernels take"),
        ("complex", ["optimizer.fused=false"], None),
        ("sparse", ["train.clip_norm=1"], "model=Odd: module.table has sparse gradients, which nothing"),
        ("random", ["activations=offload"], "activations=offload: module.layers.0.1 draws its noise aft"),
        ("random", ["activations=recompute"], None),
    ])  # fmt: skip
    def test_odd_parameters_exclude_layouts_and_levers(self, kind, options, refusal):
        words = ["model=custom", f"model._target_={__name__}.Odd", f"+model.kind={kind}", *options]
        words += ["data.inputs=8", "data.outputs=8"]
        assert make(*words) if refusal is None else refused(*words)[0].startswith(refusal)

    def test_bounded_embedding_is_accepted_with_recomputation(self):
        make(*custom("Bounded"), "activations=recompute", "parallel=single")
        (refusal,) = refused(*custom("Bounded"), "precision=bf16", "parallel=single")
        assert "changes weights in place, such as rows.weight, and it has narrow copies" in refusal

    def test_missing_model_options_are_named(self):
        found = refused("model=custom", "model._target_=torch.nn.Linear", "+model.in_feature=4", *VECTORS)
        assert found == [
            "model.in_feature=4: there is no such option; try +model.in_features, +model.out_features",
            "model.in_features=(not set): must be given",
            "model.out_features=(not set): must be given",
        ]


class Bounded(nn.Module):
    """Has an embedding that torch bounds in each forward pass, among its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.body = nn.Embedding(2, 4, max_norm=1.0), nn.Linear(4, 4)

    def layers(self) -> list[nn.Module]:
        return [self.rows, self.body]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x + self.rows(x.new_zeros(len(x), dtype=torch.int64)))


VECTORS = ("data=synthetic_vectors", "data.inputs=4", "data.outputs=4")


class Rateless(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {})


class Counter(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["steps"] = self.state[weight].get("steps", 0) + 1


class GroupCounter(torch.optim.SGD):
    """Counts its steps as Schedule-Free does."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Duck:
    tokens_per_sample = None

    def __init__(self, seed):
        pass

    def samples(self, start, stop):
        return torch.zeros(stop - start, 4), torch.zeros(stop - start, 2)

    def example(self):
        return torch.empty(1, 4, device="meta"), torch.empty(1, 2, device="meta")


def unfathomable() -> nn.Module:
    """Looks at its inputs' values, which the meta device has not."""
    return assembled(lambda self, x: self.linear(x) * (2 if x.sum().item() > 0 else 1), linear=nn.Linear(4, 4))


class Odd(nn.Module):
    """Of what is usual, one thing is not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.odd = kind, nn.Parameter(torch.ones(8, dtype=torch.complex64 if kind == "complex" else None))
        if kind == "empty":
            self.odd = nn.Parameter(torch.empty(0, 8))
        if kind == "sparse":
            self.table = nn.Embedding(8, 8, sparse=True)
        inner = nn.RReLU if kind == "random" else nn.ReLU
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), inner()) for _ in range(2))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = inputs * self.odd.sum().abs()
        for layer in self.layers:
            hidden = layer(hidden)
        loss = nn.functional.mse_loss(hidden, targets)
        return {"loss": loss + sum(p.sum() for p in self.layers.parameters()) if self.kind == "regularized" else loss}


def momentum() -> nn.Module:
    """Has a frozen weight in each layer that follows another."""

    def forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.slow.weight.data.lerp_(self.fast.weight.data, 0.1)
        return self.fast(inputs) + self.slow(inputs)

    block = assembled(forward, fast=nn.Linear(4, 4), slow=nn.Linear(4, 4).requires_grad_(False))
    return nn.Sequential(block, deepcopy(block))


class Classifier(nn.Sequential):
    """Its ranks share the classes, and its loss needs those of all."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))

    def roles(self) -> dict[str, str]:
        return {"0": "vocabulary"}


class Silent(Exception):
    def __str__(self) -> str:
        raise LookupError


def mute() -> NoReturn:
    raise Silent


def moody() -> NoReturn:
    raise RuntimeError("not today")


class TestVirtual:
    """GPUs that are not there: what is refused, and how many there are."""

    made = staticmethod(partial(make, device="auto"))

    def test_there_are_as_many_as_asked_for_of_its_memory_started_by_nobody_else(self):
        made = self.made("virtual=h100")
        assert (made.device_type, made.backend, made.world_size) == ("cuda", "nccl", 2)
        made = self.made("virtual=h100", "cluster.nodes=4", "cluster.ranks_per_node=8", "train.global_batch=32")
        assert (made.world_size, made.summary["kind"]) == (32, "virtual")
        assert self.made("parallel=single", "virtual=a100").world_size == 1
        asked = read("model=gpt_13b", "parallel=single", "virtual=a100")
        with pytest.raises(ConfigError, match=r"its GPU has 70\.9 GiB for it \(virtual NVIDIA A100-SXM4-80GB: of 79"):
            run_spec.summarize(asked, None)
        refusal = "virtual=h100: …, and torchrun has started these; run it without torchrun"
        assert refused("virtual=h100", device="auto", world=rank_of(2)) == [Abridged(refusal)]
        assert self.made("virtual=h100", world=replace(rank_of(2), launcher="local")).world_size == 2

    def test_a_run_on_real_devices_has_nothing_of_it_in_its_configuration(self):
        made = make("virtual=none")
        assert made.virtual is None
        assert "virtual" not in made.config.resolved
        assert "kind" not in made.summary
        assert run_spec.place(made.config, 2) == THIS_MACHINE

    def test_torch_has_kernels_for_it(self, monkeypatch):
        monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "sm_100"])
        refusal = (
            "virtual=v100: torch 2.14.1+cu130 … 7.0, only for sm_75, sm_80, sm_90, sm_100; try a100, or … CUDA 12.6"
        )
        assert refused("virtual=v100", device="auto") == [Abridged(refusal)]
        for name in ("a100", "h100", "h200", "b200"):
            self.made(f"virtual={name}")
