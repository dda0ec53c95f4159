"""``ptdbench export``: what won, and that the programs it is for can read it."""

import shutil
import sys

import pytest
import yaml

from ptdbench.setup.config import Config
from tests.conftest import read
from tests.daily import cases
from tests.programs import call
from tests.refusals import Abridged
from tests.report.made import Made, failed, keep, run

BATCH = {"global_batch": 16, "micro_batch": 2, "microbatches": 1}


def trained(name: str, config: Config, rate: float = 1000.0, **degrees: int) -> Made:
    """A run of a composed configuration with these degrees on two ranks or more."""
    layout = {"data": degrees.get("replicate", 1) * degrees.get("shard", 1), **degrees, **BATCH, "accumulation": 4}
    size = 1
    for degree in degrees.values():
        size *= degree
    one = run(name, rate, world_size=size, layout=layout, tokens_per_sample=32, precision=config.general.precision)
    return one | {"config": config.resolved, "nodes": ["n1"]}


@pytest.fixture
def export(ptdbench, tmp_path):
    """Writes runs into a sweep and exports it: exit status, what is written, lines of errors."""

    def call_it(target, *runs, flags=("--best",)):
        shutil.rmtree(tmp_path / "sweep", ignore_errors=True)
        for number, one in enumerate(runs):
            keep(tmp_path / "sweep", f"{number}_{one.parallel}", one)
        return ptdbench("export", tmp_path / "sweep", "--to", target, *flags)

    return call_it


FSDP = ("parallel=fsdp", "precision=bf16", "activations=recompute", "activations.every=2", "train.clip_norm=1.0")


class TestTorch:
    @cases("layout", ["fsdp", "ddp"], daily=["fsdp"])
    @pytest.mark.ranks
    def test_runs_as_it_is(self, export, layout, tmp_path, environ):
        won = {
            "fsdp": trained("fsdp", read(*FSDP, "parallel.reshard_after_forward=false"), shard=2),
            "ddp": trained("ddp", read("parallel.gradients=bf16", "precision=tf32", "compile=layers"), replicate=2),
        }[layout]
        status, text, remarks = export("fsdp2", won, trained("single", read("parallel=single"), 10.0))
        assert status == 0
        assert remarks[0].startswith("No layout is shown to be faster than another")
        assert remarks[1] == "not carried over: kernels=fused"
        own = {
            "fsdp": ["for layer in layers[::2]:", "param_dtype=torch.bfloat16", "forward=False)", "grad_norm_("],
            "ddp": ['"bucket_cap_mb": 25.0', "bf16_compress_hook", "layer.compile()", 'precision("high")'],
        }[layout]
        assert [words for words in own if words not in text] == []
        assert "#?" not in text
        (tmp_path / "layout.py").write_text(text)
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
        done = call(*torchrun, "layout.py", cwd=tmp_path, environ=environ)
        assert done.returncode == 0, done.stderr
        assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["step 0", "step 1", "step 2"]


HSDP = trained("hsdp", read(*FSDP, "parallel=hsdp", "offload=optimizer_and_weights"), replicate=2, shard=4)
TP = trained("3d", read("parallel=3d", "parallel.sequence=true", "compile=layers"), shard=2, tensor=2, pipeline=2)


class TestAccelerate:
    def test_is_a_file_of_its_launcher(self, export):
        status, text, remarks = export("accelerate", HSDP)
        written = yaml.safe_load(text)
        assert (status, written["num_processes"], written["mixed_precision"]) == (0, 8, "bf16")
        assert "fsdp_offload_params" in written["fsdp_config"]
        assert remarks[1] == "not carried over: activations.every=2, train.clip_norm=1.0, kernels=fused"
        assert "batch_size=2 of the DataLoader, Accelerator(gradient_accumulation_steps=4)" in text

    @pytest.mark.thorough
    def test_is_loaded_by_it(self, export, tmp_path, monkeypatch):
        reason = "needs accelerate: make test-all installs it"
        config_args = pytest.importorskip("accelerate.commands.config.config_args", reason=reason)
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.parallelism_config import ParallelismConfig
        from accelerate.utils.launch import prepare_multi_gpu_env

        path = tmp_path / "accelerate.yaml"
        path.write_text(export("accelerate", HSDP)[1])
        assert config_args.load_config_from_file(str(path)).num_processes == 8
        typed = launch_command_parser().parse_args(["--config_file", str(path), "--use_fsdp", "train.py"])
        typed.use_fsdp = False  # as the file says
        told = prepare_multi_gpu_env(_validate_launch_command(typed)[0])
        assert (told["ACCELERATE_USE_FSDP"], told["FSDP_VERSION"]) == ("true", "2")
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        assert ParallelismConfig().total_size == 8


class TestTorchtitan:
    def test_are_its_options(self, export):
        status, text, remarks = export("torchtitan", TP)
        options = dict(line.split("=") for line in text.splitlines() if "=" in line and line[0] != "#")
        assert status == 0
        assert options["--parallelism.pipeline_parallel_schedule"] == "1F1B"
        assert (options["--parallelism.tensor_parallel_degree"], options["--training.seq_len"]) == ("2", "32")
        assert remarks[1] == "not carried over: kernels=fused"

    @pytest.mark.thorough
    def test_are_parsed_by_it(self, export):
        reason = "needs torchtitan: make test-all installs it"
        titan = pytest.importorskip("torchtitan.config", reason=reason, exc_type=ImportError)
        from torchtitan.distributed import ParallelDims

        for won, world, schedule in ((TP, 8, "1F1B"), (HSDP, 8, "Interleaved1F1B")):
            text = export("torchtitan", won, flags=["--best"])[1]
            options = [line for line in text.splitlines() if not line.startswith("#")]
            read_by_it = titan.ConfigManager().parse_args(
                ["--module", "llama3", "--config", "llama3_debugmodel", *options]
            )
            assert read_by_it.parallelism.pipeline_parallel_schedule == schedule
            assert ParallelDims.from_config(read_by_it.parallelism, world).world_size == world


class TestRefused:
    def test_what_cannot_be_told(self, export, tmp_path):
        sweep = tmp_path / "sweep"
        told = f"--to=fsdp2: cannot express tensor=2 and pipeline=2, the layout of {sweep}/0_3d; try torchtitan"
        assert export("fsdp2", TP)[2] == [told]
        tp = trained("tp", read("parallel=tp"), 2000.0, tensor=2, replicate=2)
        told = f"--to=accelerate: cannot express replicate=2 and tensor=2, the layout of {sweep}/0_tp; try torchtitan"
        assert export("accelerate", tp)[2] == [told]

    def test_sweep_without_a_best_run(self, export, tmp_path):
        sweep = tmp_path / "sweep"
        assert export("fsdp2", failed("ddp", "no"))[::2] == (
            1, [f"export={sweep}: has no run that trained and was ok; see its table with ptdbench status"],
        )  # fmt: skip
        two = [
            trained(name, read(f"parallel={name}"), **{of: 2}) for name, of in (("ddp", "replicate"), ("fsdp", "shard"))
        ]
        told = f"export={sweep}: has 2 runs; add --best, or give the directory of one"
        assert export("fsdp2", *two, flags=())[2] == [told]
        other = two[1] | {"model": "other"}
        assert export("fsdp2", two[0], other)[2] == [Abridged(f"export={sweep}: has runs that do not compare: …")]
