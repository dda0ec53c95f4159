"""What one command line asks for, and how misspellings are answered."""

import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import open_dict, read_write

from ptdbench.problems import ConfigError
from ptdbench.setup.compose import Composed, Source, _jobs, compose_all
from tests.conftest import ROOT
from tests.refusals import Abridged, refusal_of

CONF = ROOT / "conf"


def compose(*overrides: str, multirun: bool = False) -> Composed:
    return compose_all(overrides, multirun)


def refused(*overrides: str, multirun: bool = False) -> list[str]:
    refusal = refusal_of(compose, *overrides, multirun=multirun)
    assert not GlobalHydra.instance().is_initialized()  # or the next run in this process could not compose
    return refusal.splitlines()


def labels(composed: Composed) -> list[tuple[str, str, int]]:
    return [(job.model.name, job.parallel.name, job.train.steps) for job in composed.wholes]


class TestJobs:
    def test_one_run(self):
        composed = compose("model=toy", "train.steps=5")
        assert labels(composed) == [("toy", "ddp", 5)]
        assert not composed.is_sweep
        assert composed.hydra.run.dir.endswith("_toy_ddp")
        assert "hydra" not in composed.configs[0].resolved

    @pytest.mark.parametrize("name", ["../../../../x", "/x", "a b", "x\ny"])
    def test_a_name_leads_out_of_no_directory(self, name):
        hydra = compose("model=toy", f'model.name="{name}"').hydra
        assert Path(hydra.run.dir).parent == Path("outputs")
        with read_write(hydra), open_dict(hydra):
            hydra.job.num = 0
        assert Path(hydra.sweep.subdir).name == hydra.sweep.subdir

    def test_a_sweep_is_every_combination_in_hydras_order(self):
        options = ["model=toy,gpt_tiny", "parallel=ddp,pdp", "train.steps=5", "hydra.sweep.dir=here"]
        composed = compose(*options, multirun=True)
        assert labels(composed) == [
            ("toy", "ddp", 5), ("toy", "pdp", 5), ("gpt_tiny", "ddp", 5), ("gpt_tiny", "pdp", 5),
        ]  # fmt: skip
        assert (composed.is_sweep, composed.hydra.sweep.dir) == (True, "here")
        words = ["seed=1,2", "+model.depth=choice(4,5)", "parallel=ddp,pdp", "~eval", "data@x=range(0,2)", "seed=3,4"]
        parsed = OverridesParser.create().parse_overrides(words)
        assert _jobs(parsed) == BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]

    def test_a_shuffled_list_and_a_glob_and_the_data_of_a_model(self):
        composed, again = (compose("seed=shuffle(range(1,7))", multirun=True) for _ in range(2))
        seeds = [job.seed for job in composed.wholes]
        assert sorted(seeds) == [1, 2, 3, 4, 5, 6] != seeds
        assert composed.overrides == again.overrides == [[f"seed={seed}"] for seed in seeds]
        found = {job.parallel.name for job in compose("parallel=glob(*)", multirun=True).wholes}
        assert found == {path.stem for path in (CONF / "parallel").iterdir()}
        assert compose("model=resnet18").wholes[0].data.name == "synthetic_images"
        assert compose("model=toy", "data=text").wholes[0].data.name == "text"


class TestMisspellings:
    @pytest.mark.parametrize(("override", "meant"), [
        ("optimizer.fusd=true", "optimizer.fused"),
        ("Precision=bf16", "precision"),
        ("train.lr=1e-4", "optimizer.lr"),
        ("steps=3", "train.steps"),
        ("n_layers=3", "model.layers"),
        ("batch_size=8", "train.global_batch"),
        ("batch=8", "train.global_batch"),
        ("data.seq_length=64", "data.sequence_length"),
        ("optimiser.lr=1", "optimizer.lr"),
        ("checkpointing=full", "checkpoint.keep"),
        ("model=custom model._target_=zoo.Base train.step=10", "train.steps"),
        ("model=toy model.name=x train.step=10", "train.steps"),
        ("model=custom model.depth=6", "+model.depth=6"),
        ("model._target_=zoo.Base model.depth=6 model=custom", "+model.depth=6"),
        ("hydra/sweeper=optuna hydra.sweeper.n_trial=3", "hydra.sweeper.n_trials, +hydra.sweeper.n_trial=3"),
        ("model=toy model._target_=zoo.Base model.kernel=6", "+model.kernel=6"),
        ("model=toy model._target_=zoo.Base model.widt=6", "model.width, +model.widt=6"),
    ])  # fmt: skip
    def test_an_option(self, override, meant):
        (line,) = refused(*override.split())
        wrong = next(word for word in override.split()[::-1] if word != "model=custom")
        assert line.startswith(f"{wrong}: there is no such option; try {meant}")

    @pytest.mark.parametrize(
        ("override", "meant"), [("model=gpt_tyny", "gpt_tiny"), ("model=resnet", "resnet50"), ("parallel=DDP", "ddp")]
    )
    def test_a_choice_of_a_group(self, override, meant):
        (line,) = refused(override)
        assert re.fullmatch(rf"{override}: there is no such choice; try (\w+, )*{meant}(, \w+)*", line)

    def test_what_nobody_sets_is_not_offered_and_all_come_at_once_also_in_a_sweep(self):
        found = refused("optimizer.nam=x", "optimizer.partial=true", "optimizer.target=x")
        assert not re.search(r": .*(name\b|_target_|_partial_)", "\n".join(found))
        found = refused("model=toy,gpt_tyny,gpt_tiny", "parallel=pddp", "train.stepz=3", "seed=1", multirun=True)
        assert [line.partition(":")[0] for line in found] == ["model=gpt_tyny", "parallel=pddp", "train.stepz=3"]


PRESETS = "3d, cp, ddp, ep, fsdp, hsdp, pdp, single, tp, zero1"

#: What is typed, and the whole answer; ``-m``: of a sweep.
TOLD = {
    "parallel=quantum": f"parallel=quantum: there is no such choice; try {PRESETS}",
    "parallel=zero2": "parallel=zero2: there is no such choice; try fsdp parallel.reshard_after_forward=false",
    "parallel=none": "parallel=none: there is no such choice; try single",
    "-m parallel=glob(x*)": f"parallel=glob(x*): there is no such choice; try {PRESETS}",
    "=": "=: there is no such option; see python train.py --cfg job",
    "hydra.foo=1": "hydra.foo=1: there is no such option; see python train.py --cfg hydra",
    "qqqq=1": "qqqq=1: there is no such option; see python train.py --cfg job",
    "hydra.job.env_set.FOO=1": "hydra.job.env_set.FOO=1: there is no such option; try +hydra.job.env_set.FOO=1",
    **dict.fromkeys(
        ("optimizer.momentum=0.5", "-m optimizer.momentum=0.5 optimizer=adamw,sgd"),
        "optimizer.momentum=0.5: there is no such option; try optimizer=sgd, optimizer=muon",
    ),
    "cluster.partition=gpu": "cluster.partition=gpu: there is no such option; try cluster=slurm, cluster=site_gpu, …",
    "workload.ops=all_reduce": "workload.ops=all_reduce: there is no such option; try workload=collectives",
    "hydra/launcher=submitit": "hydra/launcher=submitit: there is no such choice; try submitit_slurm",
    "hydra/launcher=foo": "hydra/launcher=foo: there is no such choice; try basic, submitit_slurm",
    "model=toy,gpt_tiny": "model=toy,gpt_tiny: is a list of values, each a run of its own; add -m to sweep",
    **dict.fromkeys(
        ("parallel=[ddp,pdp]", "-m parallel=[ddp,pdp]"),
        "parallel=[ddp,pdp]: is more than one choice in one run; try -m parallel=ddp,pdp",
    ),
    **dict.fromkeys(("train.steps", "train.steps = 3"), "train.steps=(no value): options are written NAME=VALUE, …"),
    "+parallel=fsdp": "+parallel=fsdp: it already has a choice; try parallel=fsdp",
    "hydra.run.dir=null": "hydra.run.dir=null: Error merging … is not Optional",
    "model@a=toy": "model@a=toy: Could not override 'model@a'. Did you mean to override model?",
    "-m cluster=slurm,local": "cluster=slurm,local: a sweep has one; start one sweep for each",
    "-m +hydra.job.env_set.A=Ring,Tree": "hydra.job.env_set.A=Ring,Tree: … one value …; start one sweep for each",
    "-m optimizer.lr=interval(1,2)": "optimizer.lr=interval(1,2): is a range, …; add -m hydra/sweeper=optuna, or …",
    "-m hydra/sweeper=ax seed=1,2": "hydra/sweeper=ax: there is no such choice; try basic, optuna",
}


class TestSyntax:
    @pytest.mark.parametrize("typed", TOLD)
    def test_what_is_said(self, typed):
        words = typed.removeprefix("-m ").split()
        assert refused(*words, multirun=typed.startswith("-m "))[0] == Abridged(TOLD[typed])

    def test_each_override_that_cannot_be_read_is_named(self):
        found = refused("model=[toy", "seed=1", "train.steps={")
        assert [line.partition(": cannot be read (")[0] for line in found] == ["model=[toy", "train.steps={"]

    @pytest.mark.parametrize("path", ["/a(b)", "it's", "/$a(b)"])
    def test_a_text_that_cannot_be_read_is_shown_in_quotes(self, path):
        (line,) = refused(f"data.path={path}")
        (word,) = shlex.split(line.partition("; as text it is ")[2])
        assert compose(word).wholes[0].data.path == path

    def test_what_is_no_utf_8_is_to_be_typed_so(self):
        assert refused("model.name=a\udcff\udcfeb")[0].endswith("; type it in UTF-8, without control characters")

    @pytest.mark.parametrize("override", ["parallel=null", "model="])
    def test_a_group_wants_a_name(self, override):
        assert refused(override)[0].startswith(f"{override}: there is no such choice; try ")

    @pytest.mark.parametrize("override", ["~model=toy", "hydra/job_logging=foo", "hydra=3", "~hydra", "~"])
    def test_what_only_hydra_understands_is_told_in_its_words(self, override):
        (line,) = refused(override)
        assert re.match(rf"{override}=?: (Could not|In 'hydra|Config group override)", line)

    def test_configurations_that_are_not_there(self, tmp_path):
        away = tmp_path / "away"
        for conf, name, refusal in (
            (CONF, "confg", "--config-name=confg: there is no such file in the configuration folders; try config"),
            (away, "config", f"--config-path={away}: there is no such folder (it would be {away})"),
        ):
            assert refusal_of(compose_all, (), False, Source(conf, name)) == refusal


TOY = "name: toy\n_target_: ptdbench.models.toy.Toy\ninputs: 32\nwidth: 64\noutputs: 8\nlayers: 4\n"


class TestFolderOfOnesOwn:
    @staticmethod
    def refused(folder: Path, *overrides: str) -> str:
        (line,) = refusal_of(compose_all, overrides, False, Source(CONF, extra=str(folder))).splitlines()
        return line

    def test_a_folder_that_is_not_there(self, tmp_path):
        folder = tmp_path / "typo"
        refusal = f"--config-dir={folder}: there is no such folder (it would be {folder})"
        assert self.refused(folder, "model=mine") == refusal
        folder.touch()
        assert self.refused(folder, "model=toy") == refusal

    def test_a_glob_finds_choices_there_and_a_key_may_be_a_number(self, tmp_path):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "to_mine.yaml").write_text(f"{TOY}3: x\n")
        found = compose_all(["model=glob(to*)"], True, Source(CONF, extra=str(tmp_path)))
        assert found.overrides == [["model=to_mine"], ["model=toy"]]
        assert found.configs[0].resolved["model"]["3"] == "x"

    @pytest.mark.parametrize(("text", "refusal"), [
        ("name: x\n  a: [1\n", 'mapping values are not allowed here in "{path}", line 2, column 4'),
        (f"{TOY}name: y\n", 'while constructing a mapping in "{path}"'),
        (f"{TOY}x: \x00\n", "unacceptable character #x0000"),
        (f"defaults:\n  - mine\n  - _self_\n{TOY}", "RecursionError"),
        (f"{TOY}x: &x [*x]\n", "RecursionError"),
        ("42\n", "OSError: Invalid loaded object type: int"),
        (f"defaults: 3\n{TOY}", "defaults must be a list (got int)"),
        (f"# @package a b c\n{TOY}", "Too many components in '@package a b c'"),
        (f"{TOY}x: ${{model\n", "no viable alternative at input '${model'"),
        (TOY.encode("utf-16"), "'utf-8' codec can't decode"),
    ])  # fmt: skip
    def test_a_file_that_is_no_configuration(self, tmp_path, text, refusal):
        (tmp_path / "model").mkdir()
        path = tmp_path / "model" / "mine.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        line = self.refused(tmp_path, "model=mine")
        assert line.startswith("model=mine: ")
        assert refusal.replace("{path}", str(path)) in line

    @pytest.mark.parametrize("text", ["train:\n  steps: 5\n", "defaults:\n  - override /model: toy\n"])
    def test_a_recipe_whose_package_was_forgotten(self, tmp_path, text):
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "mine.yaml").write_text(text)
        refusal = "experiment=mine: … options of experiment, …; begin the file with the line # @package _global_"
        assert self.refused(tmp_path, "experiment=mine") == Abridged(refusal)

    def test_a_configuration_that_begins_with_nothing(self, tmp_path):
        path = tmp_path / "mine.yaml"
        for text, refusal in (
            ("defaults: [config, _self_]\n", ""),
            ("", "has no cluster, .*; let the file begin with "),
            ("model: toy: small\n", "Hydra fails on it .ScannerError: "),
        ):
            path.write_text(f"{text}train:\n  steps: 5\n")
            with pytest.raises(ConfigError, match=f"^--config-name=mine: {refusal}") if refusal else nullcontext():
                assert compose_all((), False, Source(CONF, "mine", str(tmp_path))).wholes[0].train.steps == 5

    def test_a_broken_file_that_nobody_chose_hides_no_misspelling(self, tmp_path):
        (tmp_path / "optimizer").mkdir()
        (tmp_path / "optimizer" / "mine.yaml").write_text("[")
        assert self.refused(tmp_path, "optimizer.lrr=3").startswith("optimizer.lrr=3: there is no such option")

    def test_a_folder_of_hydras_search_path_has_choices_too(self, tmp_path):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "mine.yaml").write_text(TOY)
        refusal = [
            "model=mime: there is no such choice; try …",
            "train.stepz=5: there is no such option; try train.steps…",
        ]
        search = f"hydra.searchpath=[file://{tmp_path}]"
        assert refused(search, "model=mine,mime", "train.stepz=5", multirun=True) == [*map(Abridged, refusal)]


def test_options_of_the_sweeper_are_typed_with_a_plus_or_a_tilde(tmp_path):
    """As where :func:`ptdbench.sweep.execution.run_all` writes down what was typed for the sweep."""
    params = "defaults: [config, _self_]\nhydra:\n  sweeper:\n    params:\n      seed: 1,2\n"
    (tmp_path / "mine.yaml").write_text(params)
    source = Source(CONF, "mine", str(tmp_path))
    for words in (
        ["~hydra.sweeper.params.seed"],
        ["hydra/sweeper=optuna", "+hydra.sweeper.sampler.constant_liar=true"],
    ):
        composed = compose_all(["model=toy", *words], True, source)
        with source.open():
            sweep = composed.sweep()
        assert sweep.hydra.overrides.task == ["model=toy"]
        assert sweep.hydra.overrides.hydra == [*words, "hydra.mode=MULTIRUN"]


class TestExperiments:
    """Files that are chosen in one sweep, each with what only it sets."""

    FILES = {  # noqa: RUF012
        "e1": "hydra: {sweeper: {params: {optimizer.lr: '0.1,0.2'}}}",
        "e2": "hydra: {sweeper: {params: {optimizer.lr: '0.01,0.02,0.03'}}}",
        "on_slurm": "defaults: [override /cluster: slurm]",
        "in_jobs": "defaults: [override /hydra/launcher: submitit_slurm]",
        "searching": "defaults: [override /hydra/sweeper: optuna]",
        "two_at_once": "hydra: {sweeper: {max_batch_size: 2}}",
        "plain": "seed: 7",
        "elsewhere": "hydra: {sweep: {dir: there}}",
    }

    @pytest.fixture
    def runs(self, tmp_path):
        (tmp_path / "experiment").mkdir()
        for name, text in self.FILES.items():
            (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
        source = Source(CONF, extra=str(tmp_path))
        return lambda *words: compose_all(["model=toy", *words], True, source).overrides

    def test_their_lists_are_the_sweeps(self, runs):
        own = [[f"optimizer.lr={rate}", "model=toy", "experiment=e1"] for rate in (0.1, 0.2)]
        assert runs("experiment=e1") == own
        assert runs("experiment=e1", "optimizer.lr=0.5") == [["model=toy", "experiment=e1", "optimizer.lr=0.5"]]
        both = [[words[0], *words[1:], seed] for words in own for seed in ("seed=1", "seed=2")]
        assert runs("experiment=e1", "seed=1,2") == both

    def test_a_choice_among_their_lists_has_none(self, runs, tmp_path):
        (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nhydra: {sweeper: {params: {experiment: e1}}}")
        with pytest.raises(ConfigError) as error:
            compose_all(["model=toy"], True, Source(CONF, "mine", str(tmp_path)))
        refusal = (
            "hydra.sweeper.params=optimizer.lr=0.1,0.2: has no effect in a file that hydra.sweeper.params chooses …"
        )
        assert str(error.value) == Abridged(refusal)

    @pytest.mark.parametrize(("words", "refusal"), [
        ("experiment=e1,e2", "hydra.sweeper.params.optimizer.lr=0.1,0.2,0.01,0.02,0.03: a sweep has one"),
        ("experiment=plain,e2", "hydra.sweeper.params.optimizer.lr=null,0.01,0.02,0.03: a sweep has one"),
        ("experiment=e1,on_slurm", "cluster=local,slurm: a sweep has one"),
        ("experiment=on_slurm,e1", "cluster=slurm,local: a sweep has one"),
        ("experiment=e1,in_jobs", "hydra/launcher=basic,submitit_slurm: a sweep has one"),
        ("experiment=e1,searching", "hydra/sweeper=basic,optuna: a sweep has one"),
        ("experiment=plain,two_at_once", "hydra.sweeper.max_batch_size=null,2: a sweep has one"),
        ("experiment=elsewhere,e1", "hydra.sweep.dir=there,outputs/"),
        ("repeat=3,5 repeat.seed=0,1", "repeat.runs=3,5: a sweep has one"),
        ("cluster=slurm cluster.submit=wait,detach", "cluster.submit=wait,detach: a sweep has one"),
        ("hydra/sweeper=optuna experiment=e1,e2,plain", "hydra.sweeper.params.optimizer.lr=null,0.1,0.2,0.01,"),
        ("hydra/sweeper=optuna objective=throughput,held_out_loss", "objective=throughput,held_out_loss: a sweep"),
    ])  # fmt: skip
    def test_a_sweep_has_one_of_what_is_not_of_its_runs(self, runs, words, refusal):
        assert refusal_of(runs, *words.split()) == Abridged(f"{refusal}…; start one sweep for each")


class TestWhatHydraFailsOn:
    @pytest.mark.parametrize("depth", [200, 3000])
    def test_brackets_without_end(self, depth):
        (line,) = refused(f"train.steps={'[' * depth}{']' * depth}")
        assert "recursion" in line.lower()
