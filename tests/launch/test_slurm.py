"""What SLURM's commands say, asked of a real SLURM where the test cluster can say it."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex

import pytest

from ptdbench.launch import slurm as commands
from ptdbench.launch.slurm import JobState, Partition, SlurmError
from tests.programs import until

Submit = Callable[..., str]
Fake = Callable[[str, str], None]


@pytest.fixture
def submit(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Submit]:
    """Submits a shell command to the test cluster, which the commands of this process talk to; returns the job's id."""
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    monkeypatch.chdir(tmp_path)
    ids = []

    def it(command: str, *flags: str) -> str:
        words = ["sbatch", "--parsable", "--output=job.log", *flags, f"--wrap={command}"]
        ids.append(subprocess.run(words, env=slurm, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
        return ids[-1]

    yield it
    subprocess.run(["scancel", "--quiet", *ids], env=slurm, check=False)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Commands that say what the test cluster cannot: ``fake("sinfo", "echo hello")``; no real one is on PATH then."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, body: str) -> None:
        script = folder / name
        script.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{body}\n")
        script.chmod(0o755)

    return make


def script(**flags: object) -> str:
    lines = "".join(f"#SBATCH {word}\n" for word in commands.options(flags))  # type: ignore[arg-type]
    return f"#!/bin/sh\n{lines}true\n"


def when(job: str, reached: Callable[[JobState], bool]) -> JobState:
    return until(lambda: (state := commands.queue([job])[job]) and reached(state) and state, 60)


@pytest.mark.parametrize(("gres", "count"), [
    ("(null)", 0), ("", 0), ("gpu_mem:80", 0), ("gpu", 1), ("gpu:2", 2), ("gpu:a100:4(S:0,2),nvme:1", 4),
    ("gpu:v100:2,gpu:k80:4", 6), ("lscratch:100,gpu:16", 16), ("gres/gpu:tesla:3", 3), ("gres/gpu=2", 2),
])  # fmt: skip
def test_gpu_count_sums_all_types(gres, count):
    assert commands.gpu_count(gres) == count


def test_options_become_words():
    flags = {"ntasks_per_node": 2, "exclusive": True, "requeue": False, "comment": "two words"}
    assert commands.options(flags) == ["--ntasks-per-node=2", "--exclusive", "--comment=two words"]


def test_missing_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not commands.available()
    for command, call in {
        "sinfo": commands.partitions, "squeue": lambda: commands.queue(["1"]),
        "sbatch": lambda: commands.test(script()), "scancel": lambda: commands.cancel(["1"]),
    }.items():  # fmt: skip
        with pytest.raises(SlurmError, match=f"^{command} is not on PATH$"):
            call()
    assert commands.queue([]) == {}  # nothing is asked about nothing
    commands.cancel([])


class TestOtherClusters:
    def test_partition_sums_its_kinds_of_nodes(self, fake):
        lines = ("batch*|14|(null)", "batch*|2|gpu:a100:4(S:0-1)", "debug|1|gpu:v100:2,gpu:k80:4", "empty|0|(null)")
        fake("sinfo", "\n".join(f"echo '{line}'" for line in lines))
        assert commands.partitions() == [
            Partition("batch", True, (0, 4)), Partition("debug", False, (6,)), Partition("empty", False, ()),
        ]  # fmt: skip

    def test_commands_that_hang_or_cannot_start_are_told(self, fake, monkeypatch, tmp_path):
        monkeypatch.setattr(commands, "PATIENCE", 2)
        fake("sinfo", "echo 'sinfo: error: Unable to contact slurm controller' >&2; exec sleep 600")
        with pytest.raises(SlurmError, match=r"^sinfo did not answer in 2 s\nUnable to contact slurm controller$"):
            commands.partitions()
        fake("sinfo", "")
        (tmp_path / "bin" / "sinfo").chmod(0o644)
        with pytest.raises(SlurmError, match=r"^sinfo cannot be started: Permission denied$"):
            commands.partitions()

    def test_jwt_reaches_the_command(self, fake, monkeypatch):
        monkeypatch.setenv("SLURM_JWT", "token")
        fake("sbatch", "test \"$SLURM_JWT\" = token || { echo 'Protocol authentication error' >&2; exit 1; }; echo 7")
        assert commands.submit(script()) == "7"


class TestHistory:
    @pytest.fixture(autouse=True)
    def _forgetful(self, fake):
        commands._keeps_accounts.cache_clear()
        fake("squeue", "echo '7_0|RUNNING|gpu[01-02]|None|mine'")
        yield
        commands._keeps_accounts.cache_clear()

    def test_sacct_has_the_jobs_that_squeue_forgot(self, fake, tmp_path):
        ended = ("7_1|CANCELLED by 1000|gpu03|None|mine", "9|TIMEOUT|None assigned|None|a|b")
        fake("sacct", f'echo "$*" >> {tmp_path}/asked; ' + "; ".join(f"echo '{line}'" for line in ended))
        assert list(commands.queue(["7"])) == ["7_0"]
        assert not (tmp_path / "asked").exists()
        assert commands.queue(["7_0", "7_1", "9", "11"]) == {
            "7_0": JobState("7_0", "RUNNING", "gpu[01-02]", ""),
            "7_1": JobState("7_1", "CANCELLED", "gpu03", ""),
            "9": JobState("9", "TIMEOUT", "", ""),
        }
        assert (tmp_path / "asked").read_text().splitlines()[-1].endswith("--jobs=11,7,9")

    @pytest.mark.parametrize("query", ["--jobs=1", "--jobs=9"])
    def test_failing_slurmdbd_is_asked_again(self, fake, tmp_path, query):
        down, message = tmp_path / "down", "sacct: error: Problem talking to the database: Connection refused"
        down.touch()
        answers = f"case $* in *{query}) test -e {down} && {{ echo '{message}' >&2; exit 1; }};; esac"
        fake("sacct", f"{answers}; echo '9|TIMEOUT|n1|None|mine'")
        with pytest.raises(SlurmError, match=r"^Problem talking to the database: Connection refused$"):
            commands.queue(["9"])
        down.unlink()
        assert commands.queue(["9"])["9"].state == "TIMEOUT"

    def test_without_sacct_ended_jobs_are_absent(self):
        assert commands.queue(["9"]) == {}

    def test_disabled_sacct_is_asked_once(self, fake, tmp_path):
        fake("sacct", f"echo x >> {tmp_path}/asked; echo 'Slurm accounting storage is disabled' >&2; exit 1")
        for _ in range(3):
            assert commands.queue(["9"]) == {}
        assert (tmp_path / "asked").read_text() == "x\n"

    def test_elements_that_never_began_have_their_arrays_name(self, fake):
        elements = [f"7_[{listed}]|CANCELLED by 0|None assigned|None|mine" for listed in ("1-2", "4,6,...")]
        fake("sacct", "; ".join(f"echo '{line}'" for line in elements))
        jobs = commands.named(["mine"])["mine"]
        assert {number: state.state for number, state in jobs.items()} == {
            0: "RUNNING", 1: "CANCELLED", 2: "CANCELLED",
        }  # fmt: skip

    def test_cancel_by_name_needs_no_sacct(self, fake, tmp_path):
        fake("squeue", "echo '7|RUNNING|n1|None|mine'")
        fake("sacct", "exit 1")
        fake("scancel", f"echo $* > {tmp_path}/canceled")
        assert commands.cancel_named(["mine"]) == ["7"]
        assert (tmp_path / "canceled").read_text() == "--quiet 7\n"


class TestRealSlurm:
    def test_users_slurm_variables_are_ignored(self, submit, monkeypatch):
        job = submit("true", "--hold")
        variables = {"SBATCH_PARTITION": "nope", "SBATCH_ARRAY_INX": "0-5", "SLURM_NNODES": "7"}
        for name, value in (variables | {"SINFO_PARTITION": "short", "SQUEUE_PARTITION": "short"}).items():
            monkeypatch.setenv(name, value)
        assert commands.available()
        assert commands.partitions() == [
            Partition("debug", True, (2,)), Partition("short", False, (2,)), Partition("gpu", False, (2,)),
        ]  # fmt: skip
        assert job in commands.queue([job])
        assert "in partition debug" in commands.test(script(nodes=1))
        ignored = ["SBATCH_ARRAY_INX=0-5", "SBATCH_PARTITION=nope"]
        assert commands.ignored_variables(variables | {"SBATCH_WCKEY": "x", "SLURM_CONF": "y"}) == ignored

    @pytest.mark.parametrize(("flags", "words"), [
        ({"nodes": 3}, "allocation failure: Requested node configuration is not available"),
        ({"partition": "gpux"}, "invalid partition specified: gpux"),
        ({"coffee": "black"}, "unrecognized option '--coffee=black'"),
        ({"mem": "1G", "mem_per_cpu": "1G"}, "--mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive."),
    ])  # fmt: skip
    def test_refusal_has_slurms_own_words(self, submit, flags, words):
        with pytest.raises(SlurmError) as caught:
            commands.test(script(**flags))
        assert str(caught.value).splitlines()[0] == words

    def test_submitted_job_is_found_by_name(self, submit):
        alone, array = (f"ptdbench-test-{token_hex(4)}" for _ in range(2))
        job = commands.submit(script(job_name=alone, hold=True, output="/dev/null"))
        elements = commands.submit(script(job_name=array, hold=True, output="/dev/null", array="0-2"))
        try:
            jobs = commands.named([alone, array, "ptdbench-nobody"])
            assert {name: set(states) for name, states in jobs.items()} == {alone: {None}, array: {0, 1, 2}}
            assert (jobs[alone][None].id, jobs[array][2].id) == (job, f"{elements}_2")
            assert jobs[array][1].state == "PENDING"
        finally:
            canceled = commands.cancel_named([alone, array, "ptdbench-nobody"])
        assert set(canceled) == {job, *(f"{elements}_{number}" for number in range(3))}
        for identity in (job, f"{elements}_1"):
            assert when(identity, lambda state: state.is_over).state == "CANCELLED"

    def test_array_elements_have_states_and_are_requeued_alone(self, submit):
        """Its own id is that of the array, by which SLURM would start all elements once more."""
        command = "test $SLURM_ARRAY_TASK_ID = 2 && exec sleep 600; exit $SLURM_ARRAY_TASK_ID"
        array = submit(command, "--array=0-2", "--requeue")
        good, bad = (when(f"{array}_{index}", lambda job: job.is_over) for index in (0, 1))
        assert (good.state, good.reason) == ("COMPLETED", "")
        assert (bad.state, bad.reason) == ("FAILED", "NonZeroExitCode")
        assert bad.nodes in ("n1", "n2")
        assert when(f"{array}_2", lambda job: job.state == "RUNNING").nodes
        commands.requeue(f"{array}_2")
        assert not when(f"{array}_2", lambda job: job.state == "PENDING").is_over
        assert commands.queue([f"{array}_0"])[f"{array}_0"].state == "COMPLETED"
        assert set(commands.queue([array])) == {f"{array}_{index}" for index in range(3)}
        assert set(commands.queue([f"{array}_1"])) == {f"{array}_1"}

    def test_held_canceled_and_unknown_jobs_have_their_states(self, submit):
        commands._keeps_accounts.cache_clear()
        job = submit("true", "--hold")
        assert when(job, lambda state: state.reason != "") == JobState(job, "PENDING", "", "JobHeldUser")
        assert commands.queue(["99999999"]) == {}
        assert set(commands.queue(["99999999", job])) == {job}
        commands.cancel([job])
        assert when(job, lambda job: job.is_over).state == "CANCELLED"
        commands.cancel([job])  # it stays so

    def test_thousand_jobs_are_one_query(self, submit, monkeypatch):
        array = submit("true", "--hold", "--array=0-999")
        queries, run = [], commands._run
        monkeypatch.setattr(commands, "_run", lambda *words, **options: queries.append(words) or run(*words, **options))
        jobs = commands.queue([f"{array}_{index}" for index in range(1000)])
        assert (len(jobs), len(queries)) == (1000, 1)
        assert {job.state for job in jobs.values()} == {"PENDING"}


def test_clusters_are_the_chosen_or_the_configured(fake, monkeypatch):
    fake(
        "scontrol", "printf 'Configuration data as of now\\nCluster             = x\\nClusterName             = gpu\\n'"
    )
    for chosen, names in (("", ["gpu"]), ("one,two", ["one", "two"])):
        monkeypatch.setenv("SLURM_CLUSTERS", chosen)
        commands.clusters.cache_clear()
        assert commands.clusters() == names
    commands.clusters.cache_clear()


@pytest.mark.parametrize("answer", ["7;cluster", "auks: credential of user\\n7", "Welcome\\n\\n7;cluster\\n"])
def test_job_id_is_found_after_a_sites_messages(fake, answer):
    fake("sbatch", f"cat > /dev/null; printf '{answer}'")
    assert commands.submit(script()) == "7"
    fake("sbatch", "cat > /dev/null; echo no")
    with pytest.raises(SlurmError, match="sbatch did not say the id of the job: no"):
        commands.submit(script())


#: As ``scontrol show hostnames`` of Slurm 22.05 prints them, but for names that go on after brackets, which it refuses.
HOST_LISTS = {
    "login,gpu[1-2]": "login gpu1 gpu2",
    "gpu[01-03,7]": "gpu01 gpu02 gpu03 gpu7",
    "x[1-2]y[08-10]": "x1y08 x1y09 x1y10 x2y08 x2y09 x2y10",
    "n[9-11],n[009-10]": "n9 n10 n11 n009 n010",
    "n[2,1,1],[1-2],,b,b,": "n2 n1 n1 1 2 b b",
    "": "",
    "gpu[01-03,7]-ib,cpu[1-2]": "gpu01-ib gpu02-ib gpu03-ib gpu7-ib cpu1 cpu2",
    "rack[0-1]node[1-2].site": "rack0node1.site rack0node2.site rack1node1.site rack1node2.site",
}


@pytest.mark.parametrize(("text", "hosts"), HOST_LISTS.items())
def test_host_list_is_expanded_as_by_scontrol(text, hosts):
    assert commands.expand_hosts(text) == hosts.split()


@pytest.mark.parametrize("text", ["n[1", "n[1-2", "a,n[1", "n[1-]", "n[-2]", "n[1-2-3]", "n[a-b]"])
def test_malformed_host_list_is_refused(text):
    with pytest.raises(ValueError, match="is not a list of hosts"):
        commands.expand_hosts(text)
