"""``python -m ptdbench``: what it prints and its exit status."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ptdbench import __main__ as command
from ptdbench.records import ledger, store
from tests.conftest import ROOT
from tests.programs import call, until
from tests.sweep.made import Directory, failure


@pytest.fixture
def sweep(tmp_path):
    return Directory(tmp_path / "sweep")


@pytest.fixture
def ptdbench(monkeypatch, capsys):
    """Calls it: exit status, lines of output, lines of errors."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["ptdbench", *map(str, words)])
        status = command.main()
        said = capsys.readouterr()
        return status, said.out.splitlines(), said.err.splitlines()

    return call


class TestStatus:
    def test_status_of_a_running_sweep(self, sweep, ptdbench):
        for number in (0, 1):
            sweep.begin(number)
        sweep.end(0)
        status, out, err = ptdbench("status", sweep.path)
        assert (status, "unfinished" in out[3], err) == (0, True, [])

    def test_status_of_an_ended_sweep_is_its_table(self, sweep, ptdbench):
        ledger.write(sweep.path, ledger.Ledger(["model=toy"], []))  # a folder of runs has no table
        for number, outcome in enumerate(({}, failure())):
            sweep.begin(number)
            sweep.end(number, model="toy", parallel="ddp", **outcome)
        status, (title, _, _, row, *below), _ = ptdbench("status", sweep.path)
        assert (status, title) == (1, "toy · fp32")
        assert row.endswith("1 ok, 1 failed")
        assert below[0] == "ddp: failed on rank 1: RuntimeError: on purpose"
        assert below[-2].startswith("report       ")
        assert below[-1] == f"resume       ptdbench train sweep.resume={sweep.path}"

    def test_as_json(self, sweep, ptdbench):
        """Of a run that goes on how far it is, of one that has ended its record's figures."""
        for number in (0, 1, 2):
            sweep.begin(number)
        sweep.end(0)
        sweep.end(1, **failure())
        sweep.tell(2, {"step": 3, "steps": 60, "unit": "samples", "per_second": 12.5})
        status, out, err = ptdbench("status", sweep.path, "--json")
        assert (status, err) == (1, [])
        told = json.loads("\n".join(out))
        assert (told["is_over"], told["damage"], told["slurm"]) == (False, [], None)
        ok, failed, going = told["runs"]
        assert (ok["status"], ok["step"], ok["tokens_per_second"], ok["error"]) == ("ok", 3, 41234.5, None)
        assert (failed["status"], failed["is_over"]) == ("failed", True)
        assert (failed["error"]["rank"], failed["error"]["type"]) == (1, "RuntimeError")
        assert (going["is_over"], going["step"], going["steps"]) == (False, 3, 60)
        assert (going["samples_per_second"], going["tokens_per_second"]) == (12.5, None)
        assert [run["directory"] for run in told["runs"]] == [f"{number}_toy_ddp" for number in (0, 1, 2)]

    @pytest.mark.parametrize("name", ["", "not there"])
    def test_nothing_there(self, sweep, ptdbench, name):
        path = sweep.path / name
        expected = f"{path}: there is no run and no sweep; give a directory below outputs"
        assert ptdbench("status", path) == (1, [], [expected])
        assert ptdbench("status", path, "--json") == (1, [], [expected])

    def test_a_sweep_that_was_killed_before_its_first_run(self, tmp_path, ptdbench):
        (tmp_path / "sweep.json").write_text("{}")
        expected = f"{tmp_path}: a sweep or plan none of whose runs has begun; start it again, in another directory"
        for name in ("status", "report", "explain"):
            assert ptdbench(name, tmp_path) == (1, [], [expected])


@pytest.mark.parametrize(
    "words", [["-m", "ptdbench", "train"], [ROOT / "train.py"], ["-m", "ptdbench", "report", "."]], ids=str
)
def test_ctrl_c_while_it_imports_is_quiet(words, tmp_path, environ):
    (tmp_path / "msgspec.py").write_text("import time\nopen('imports', 'w').close()\ntime.sleep(60)")
    given = {**environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=given, **pipes) as process:
        until((tmp_path / "imports").exists)
        process.send_signal(signal.SIGINT)
        assert (process.wait(30), process.stdout.read()) == (130, b"")


@pytest.mark.parametrize("words", [["status"], ["report", "--html", "--md", "--latex"], ["compare", "."]])
def test_a_folder_that_somebody_sent_is_read_and_runs_nothing(sweep, environ, words):
    """As a process of its own: what Python imports before the command begins cannot be seen from within."""
    sweep.begin(0)
    sweep.end(0)
    results = {"model": None, "workload": "notes", "notes": {"answer": 42}}
    told = store.load_record(sweep.path / "0_toy_ddp") | results
    told["config"]["workload"]["_target_"] = "notes.W"
    store.write_record(sweep.path / "0_toy_ddp", told)
    modules = ("notes", "torch", "numpy", "pandas", "plotly", "scipy", "hydra", "omegaconf", "rich", "yaml", "argparse")
    for name in modules:
        (sweep.path / f"{name}.py").write_text("open('taken', 'w')")
    command, *options = words
    call(sys.executable, "-m", "ptdbench", command, ".", *options, cwd=sweep.path, environ=environ)
    assert not (sweep.path / "taken").exists()
    assert command != "report" or '"answer": 42' in (sweep.path / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("expalin", "try explain"), ("status --jsno a", "try --json"), ("plan --model toy", "try model=toy"),
        ("sbatch --model=toy", "try model=toy"), ("status a b", ""), ("explain a --against b", ""),
        ("virtual h100 python a.py", "put -- before a program"),
    ],
)  # fmt: skip
def test_a_mistyped_word_is_refused_with_what_may_have_been_meant(ptdbench, capsys, words, remedy):
    with pytest.raises(SystemExit) as ended:
        ptdbench(*words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].partition("; ")[2] == remedy


#: What a shell does when Tab is pressed after each line.
COMPLETED = """
eval "$(python -c 'import argcomplete; print(argcomplete.shellcode(["ptdbench"]))')"
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMPREPLY=()
    read -ra COMP_WORDS <<< "$COMP_LINE"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _python_argcomplete ptdbench
    echo "${COMPREPLY[@]}"
done
"""


def test_bash_completes_commands_flags_options_and_directories(tmp_path, environ):
    pytest.importorskip("argcomplete")
    (tmp_path / "outputs" / "sweep").mkdir(parents=True)
    lines = {
        "ptdbench expl": "explain", "ptdbench compare --fail": "--fail-if-slower", "ptdbench report outp": "outputs/",
        "ptdbench train model=llama_t": "llama_tiny", "ptdbench plan -m parallel=ddp,fs": "ddp,fsdp",
        "ptdbench sbatch parallel=fsdp train.st": "train.steps=",
    }  # fmt: skip
    shell = {**environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"}
    done = call("bash", "-c", COMPLETED, cwd=tmp_path, environ=shell, told="\n".join([*lines, ""]))
    assert [line.strip() for line in done.stdout.splitlines()] == [*lines.values()], done.stderr


def test_a_script_goes_to_standard_output_and_remarks_and_refusals_to_standard_error(ptdbench, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no SLURM
    monkeypatch.setenv("SBATCH_PARTITION", "far")
    status, out, err = ptdbench("sbatch", "-m", "model=toy", "cluster.nodes=2", "cluster.gpus_per_node=0")
    assert (status, out[0]) == (0, "#!/bin/bash")
    assert "#SBATCH --nodes=2" in out
    assert err == ["sbatch prefers these variables of this shell to the script's lines: SBATCH_PARTITION=far"]
    status, out, err = ptdbench("sbatch", "model=toyy", "--config-dir", tmp_path, "parallel=dpd")
    assert (status, out) == (1, [])
    assert [line.partition(":")[0] for line in err] == ["model=toyy", "parallel=dpd"]


@pytest.mark.parametrize("name", ["compare", "explain", "plan", "report", "run", "sbatch", "status"])
def test_every_command_has_help(ptdbench, name, capsys):
    with pytest.raises(SystemExit) as ended:
        ptdbench(name, "--help")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: ptdbench {name}")
