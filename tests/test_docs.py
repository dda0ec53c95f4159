"""What the README and the pages of docs/ show is what happens: refusals, scripts, links, and runs in a smaller form.

That every command composes is tested with the files of conf/, in conf/test_every_config.py.
"""

import re
import shlex
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from ptdbench import __main__ as program
from ptdbench.launch import slurm
from ptdbench.launch.slurm import Partition
from ptdbench.launch.world import World, discover
from ptdbench.parallel.pipeline_schedules import SPLITS_SINCE
from ptdbench.run import launched
from ptdbench.setup import config, run_spec
from ptdbench.setup.compose import compose_all
from ptdbench.setup.training_spec import prepare_data
from ptdbench.sweep import requests
from tests.conftest import ROOT, composed
from tests.daily import cases
from tests.parallel.splitting import is_refused
from tests.refusals import refusal_of
from tests.report.made import failed, keep
from tests.shown import PAGES, commands, links, refusals, whole

#: What `make slurm-up` starts, of which the pages show what it says.
PARTITIONS = [
    Partition("debug", is_default=True, gpus=(2,)),
    Partition("short", is_default=False, gpus=(2,)),
    Partition("gpu", is_default=False, gpus=(2,)),
]
TEXTS = [page.read_text() for page in PAGES]
REFUSED = [refusal for text in TEXTS for refusal in refusals(text)]

#: Commands that are not run here: those that submit, download, or need the reader's own files; help; and what other
#: tests run: experiments (test_train_for_real.py), searches (test_search.py, planning/), virtual GPUs (virtual/), the
#: check and matrix products (workloads/), long at any size.
ELSEWHERE = re.compile(
    r"cluster=|launcher=|virtual=|my_package|/data/|download=|--help|--cfg|experiment=|sweeper=|\bcheck\b|matmul"
    r"|micro_batch=(max|best)"
)
TO_RUN = sorted({command for text in TEXTS for command in commands(text) if not ELSEWHERE.search(command)})

#: What makes a run small, by how its model or its workload is named; other models are small already.
SMALL = {
    "gpt": ("model.layers=4", "model.width=48", "model.sequence_length=32", "train.steps=2", "train.global_batch=8"),
    "llama": ("model.layers=4", "model.width=48", "model.sequence_length=32", "train.steps=2", "train.global_batch=8"),
    "moe": ("model.sequence_length=32", "train.steps=2"),
    "resnet": ("model.image_size=32", "train.steps=2"),
    "qwen2forcausallm": ("data.sequence_length=16", "model.config.hidden_size=32", "train.steps=2"),
    "p2p": ("workload.max_bytes=1024", "workload.seconds=0.001"),
    "collectives": ("workload.max_bytes=1024", "workload.seconds=0.001"),
    "hello": (),
}


def test_the_ci_workflow_shows_what_fails(tmp_path, monkeypatch, capsys):
    """commands/test_compare.py has two commits of which one breaks a model."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "ci.md").read_text(), re.DOTALL)
    steps = {step["name"]: step for step in yaml.safe_load(text)["jobs"]["compare"]["steps"] if "run" in step}
    assert {name: step.get("if") for name, step in steps.items()} == {
        "Install": None, "Compare with the base": None, "Report": "always()", "Comment": "always()",
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    keep(tmp_path / "outputs" / "now_compare" / "after" / "0", "0_ddp", failed("ddp", "broken"))
    words = steps["Report"]["run"].replace("*", "now").split()
    monkeypatch.setattr(sys, "argv", words)
    assert program.main() == 0
    assert "broken" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.html").exists()
    assert steps["Comment"]["run"].endswith("--body-file report.md")
    monkeypatch.setattr(sys, "argv", ["ptdbench", "compare", "--help"])
    with pytest.raises(SystemExit):
        program.main()
    flags = {word for word in steps["Compare with the base"]["run"].split() if re.fullmatch(r"--\w.*", word)}
    assert flags <= set(re.findall(r"--[\w-]+", capsys.readouterr().out))


def test_manifests_start_a_rank_with_its_variables():
    texts = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "launchers.md").read_text(), re.DOTALL)
    train_job, _, job = (manifest for text in texts for manifest in yaml.safe_load_all(text))
    (rank,) = job["spec"]["template"]["spec"]["containers"]
    environ = {variable["name"]: variable.get("value", "1") for variable in rank["env"]}
    environ["LOCAL_WORLD_SIZE"] = "1"  # as pods count
    launched.recognize(environ, rank["command"])
    assert discover(environ) == World(1, 2, 0, 1, "env", nodes=2)
    for command in (train_job["spec"]["trainer"]["command"], rank["command"]):
        assert of(" ".join(command[2:]))


def of(page_command: str) -> list[list[str]]:
    words = shlex.split(page_command)
    overrides = [word for word in words if not word.startswith("-")]
    return compose_all(overrides, multirun="-m" in words).overrides


def smaller(overrides: list[str]) -> list[str]:
    job = composed(*overrides)
    name = job.workload.name if job.workload.name != "train" else job.model._target_.rpartition(".")[2].lower()
    return [*overrides, *SMALL.get(name, ("train.steps=2",)), "device=cpu"]


@pytest.fixture(scope="module")
def done() -> set[str]:
    """The runs so far: the same run is shown several times."""
    return set()


def skip_where_torch_is_too_old(command: str) -> None:
    if is_refused(command):
        pytest.skip(f"needs torch {SPLITS_SINCE}")


@pytest.mark.ranks
@cases("command", TO_RUN, daily=["", "model=custom"])
def test_documented_command_runs(command, shared_run, done):
    skip_where_torch_is_too_old(command)
    for overrides in map(smaller, of(command)):
        job = composed(*overrides)
        resolved = OmegaConf.to_yaml(job, resolve=False)
        if resolved not in done:
            record = shared_run(*overrides)
            assert record["status"] == "ok", record["error"]
            done.add(resolved)


def test_documented_commands_are_found_in_short_pages():
    assert {"", "-m model=gpt_tiny parallel=ddp,pdp,fsdp", "workload=hello", "model=custom"} <= set(TO_RUN)
    assert len(REFUSED) >= 4
    assert len(TEXTS[0].splitlines()) <= 150


def specify(command: str) -> None:
    """Check the run of a command as far as it is checked before anything starts or is submitted."""
    found = compose_all(shlex.split(command), multirun=False)
    read = found.configs[0]
    if isinstance(read.cluster, config.Slurm):
        requests.of_cluster(found)
        return
    training = run_spec.specify(read, None, 0).training
    prepare_data(read, training.data)


@pytest.mark.parametrize(("command", "lines"), REFUSED, ids=[command for command, _ in REFUSED])
def test_documented_refusal_has_these_words(command, lines, monkeypatch):
    skip_where_torch_is_too_old(command)
    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "partitions", lambda: PARTITIONS)
    assert refusal_of(specify, command).splitlines() == lines


def test_documented_script_is_the_real_one(monkeypatch):
    monkeypatch.setattr(slurm, "available", lambda: False)
    page = whole((ROOT / "docs" / "slurm.md").read_text())
    shown = re.search(r"ptdbench sbatch (.*) > job.sh\n\$ cat job.sh\n(.*)\$ sbatch job.sh\n", page, re.DOTALL)
    text, _ = requests.write_script(shlex.split(shown[1]))
    text = text.replace(sys.executable, "/home/ada/ptdbench/.venv/bin/python")
    assert text.replace(str(ROOT), "/home/ada/ptdbench") == shown[2]


def test_commands_fit_a_terminal():
    """But for the line of a script that the page shows as it is written."""
    typed = re.compile(r"^(?: {4}|\$ )?(?:python|torchrun|srun|mpirun|tensorboard) .*|^(?: {4}|\$ )ptdbench .*", re.M)
    assert {
        line for text in TEXTS for line in typed.findall(text) if len(line) > 80 and "/home/ada" not in line
    } == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    """Anchors too: on the page itself, and on others. Sphinx checks docs/ once more, by other rules than GitHub's."""
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], link


def test_every_group_has_its_page_of_options():
    groups = {path.parent.name for path in (ROOT / "conf").glob("[!h]*/*.yaml")}
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "options").glob("*.md")}
    assert set(pages) == groups | {"index"}
    for group in groups:
        assert f"<!-- options: {group} -->" in pages[group]
        assert f"\n{group}\n" in pages["index"]
