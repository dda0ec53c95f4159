"""A real SLURM of two nodes on this one machine, for the tests and for a person who wants to try it.

    python -m tests.slurm_cluster up      start it, or use the one that runs
    python -m tests.slurm_cluster down    stop it and remove what it wrote

The nodes n1 and n2 have four CPUs and two GPUs each, as far as SLURM knows, whatever this machine has.
All that the cluster writes lies in one folder (``.slurm`` in the project, or the one named as the last argument).
Beside it there are a marked line in /etc/hosts, so that the names of the nodes resolve, and munged, which a machine
has once: the line goes with its cluster, a munged that was started here goes with the last one. Several clusters run
side by side, each in its own folder and on its own ports.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryFile

import psutil

#: Where a person's cluster lives.
FOLDER = Path(__file__).parent.parent / ".slurm"

NODES = ("n1", "n2")

#: Debian's packages, and the commands or files by which they are known to be there.
PACKAGES = {
    "slurm-wlm": ("slurmctld", "slurmd", "sbatch", "srun", "scontrol"),
    "munge": ("munged", "munge", "mungekey"),
    "libslurm-dev": ("/usr/include/slurm/spank.h",),
    "openmpi-bin": ("mpirun",),
    "chromium": ("chromium",),
}

#: What the cluster needs; the last for containers.
OF_CLUSTER = ("slurm-wlm", "munge", "libslurm-dev")

#: How long the cluster may take to start, or its jobs to end, in seconds; both take about five on two busy cores.
PATIENCE = 60

#: Under some sudo, su and container, root's PATH lacks the folders of the daemons.
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/bin", "/sbin", "/bin"))
_IN_FOLDER = ("gpu", "log", "run", "state", "spool/n1", "spool/n2")
_WORKING = {"idle", "mixed", "allocated", "completing"}
_HOSTS = Path("/etc/hosts")
_MARK = "# test cluster of ptdbench in "
#: What munged insists on, with the rights that it wants.
_MUNGE_FOLDERS = {"/etc/munge": 0o700, "/run/munge": 0o755, "/var/log/munge": 0o700, "/var/lib/munge": 0o711}
_MUNGE_KEY = Path("/etc/munge/munge.key")
#: Not the one that munged writes by itself: the munged that has this one was started here.
_MUNGE_PID = Path("/run/munge/ptdbench.pid")
#: Below the ports at which ranks meet (10000 and up) and those that the kernel gives to outgoing connections.
_FIRST_PORT = 7000
#: A step's socket, ``spool/n1/n1_<job>.<step>`` in the folder, may have a path of 107 characters.
_LONGEST_FOLDER = 70

_SLURM_CONF = """\
ClusterName=ptdbench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
FirstJobId={first_job}

# The least that a container lets root do: no cgroups, no pinning, no accounting.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
MailProg={true}

# EnforcePartLimits stays at SLURM's default: what is over a partition's limit is accepted, and waits for ever.
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1

# Jobs start within a second, and may save for as long as by SLURM's default.
# A busy machine is not taken for a dead node.
KillWait=30
MinJobAge=300
InactiveLimit=120
SlurmdTimeout=60
MessageTimeout=30
TCPTimeout=10
ReturnToService=2

StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/run/%n.pid
SlurmdLogFile={folder}/log/%n.log
SlurmdParameters=config_overrides

GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=8000 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=8000 Gres=gpu:2

PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=60 State=UP
PartitionName=short Nodes=n1 MaxTime=5 State=UP
PartitionName=gpu Nodes=n[1-2] DefaultTime=60 MaxTime=INFINITE State=UP
"""

_FILES = {
    "slurm.conf": _SLURM_CONF,
    "gres.conf": "NodeName=n[1-2] Name=gpu File={folder}/gpu/gpu[0-1]\n",
    "plugstack.conf": "required {folder}/run/pyxis_stand_in.so\n",
}


class ClusterError(RuntimeError):
    """The cluster does not do what it should; the message has the ends of its logs."""


class Unavailable(ClusterError):
    """This machine cannot have the cluster, or a package; the message says why."""


def up(folder: Path = FOLDER) -> Path:
    """Start the cluster of ``folder`` and wait until both nodes are idle; one that works is used as it is.

    One that is half dead is stopped and started afresh: its jobs are lost.

    Returns:
        The path of its slurm.conf, the value for SLURM_CONF.

    Raises:
        Unavailable: This machine cannot have it, or not in this folder.
        ClusterError: It does not start.
    """
    folder = folder.resolve()
    if len(str(folder)) > _LONGEST_FOLDER or re.search(r"[^\w./+-]", str(folder)):
        rule = f"SLURM needs a path without spaces of at most {_LONGEST_FOLDER} characters; /tmp/slurm would do"
        raise Unavailable(f"not in {folder}: {rule}")
    install(*OF_CLUSTER)
    with _alone():
        if not works(folder):
            _stop(folder)
            _start(folder)
    return folder / "slurm.conf"


def down(folder: Path = FOLDER) -> None:
    """End the jobs and the daemons of the cluster of ``folder`` and remove what it wrote; nothing there is fine."""
    with _alone():
        _stop(folder.resolve())


def works(folder: Path = FOLDER) -> bool:
    """Whether the daemons of the cluster of ``folder`` run and both nodes take jobs."""
    return set(node_states(folder).values()) <= _WORKING


def node_states(folder: Path = FOLDER) -> dict[str, str]:
    """The state of each node in SLURM's words, ``"dead"`` where its daemon or the controller is gone."""
    folder = folder.resolve()
    running = processes(folder)
    alive = {path.stem for path in (folder / "run").glob("*.pid") if _pid(path) in running}
    if "slurmctld" not in alive:
        return dict.fromkeys(NODES, "dead")
    said = ask(folder / "slurm.conf", "sinfo", "--noheader", "--Node", "--format=%N %T", "--partition=debug")
    states = dict(line.split(maxsplit=1) for line in said.splitlines())
    return {node: states.get(node, "unknown") if node in alive else "dead" for node in NODES}


def cancel(conf: Path, wckey: str | None = None) -> None:
    """End all jobs, or those submitted under ``wckey``, and wait until they have left the nodes.

    Raises:
        ClusterError: Some are still there after a minute.
    """

    def left() -> list[str]:
        jobs = ask(conf, "squeue", "--noheader", "--format=%i %w %T %N %j").splitlines()
        return [job for job in jobs if wckey in {None, job.split()[1]}]

    if left():
        ask(conf, "scancel", f"--wckey={wckey}" if wckey else "--user=root")
    if not _within(PATIENCE, lambda: not left()):
        raise ClusterError("\n".join(("jobs that do not end:", *left(), _logs(conf.parent))))


def ask(conf: Path, *command: str) -> str:
    """What a command of the cluster of ``conf`` prints; nothing where it fails, or the controller does not answer."""
    if not conf.exists():  # the command would look for one elsewhere on the network
        return ""
    with contextlib.suppress(subprocess.TimeoutExpired, FileNotFoundError):
        done = subprocess.run(
            command, env=_environ(conf), capture_output=True, text=True, timeout=PATIENCE / 2, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def processes(folder: Path) -> set[int]:
    """The daemons of the cluster of ``folder``, and what they started for jobs; no person's shell under salloc."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is none of ours
            environ = process.environ()
            is_slurm = "SLURMD_NODENAME" in environ or process.name().startswith("slurm")
            if is_slurm and environ.get("SLURM_CONF") == str(folder / "slurm.conf"):
                found.add(process.pid)
    return found


def missing(*packages: str) -> str:
    """Why the cluster, or the ``packages`` where some are named, cannot be had here; empty if they can be."""
    packages = packages or OF_CLUSTER
    lacking, runs_daemons = _lacking(packages), "slurm-wlm" in packages
    nothing = f"there is no {' and no '.join(lacking)} (Debian's names) here"
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if lacking and not shutil.which("apt-get", path=_PATH):
        return f"{nothing}, and no apt-get to install it with"
    if lacking and os.geteuid():
        return f"{nothing}, and only root may `apt-get install --no-install-recommends {' '.join(lacking)}`"
    if os.geteuid() and runs_daemons:
        return "only root may start its daemons (slurmctld, slurmd, munged)"
    if not os.access(_HOSTS, os.W_OK) and runs_daemons:
        return f"{_HOSTS}, where the nodes get their names, cannot be written"
    return ""


def install(*packages: str) -> None:
    """Install those of ``packages`` that are not there, with apt.

    Raises:
        Unavailable: They cannot be had.
    """
    if reason := missing(*packages):
        raise Unavailable(reason)
    if not (lacking := _lacking(packages)):
        return
    print(f"installing {', '.join(lacking)} ...", flush=True)
    apt = ("apt-get", "--quiet", "--yes", "-o", "DPkg::Lock::Timeout=300")
    environ = {**os.environ, "PATH": _PATH, "DEBIAN_FRONTEND": "noninteractive"}
    _run(*apt, "update", environ=environ)  # a list that cannot be had may be one that is not needed
    status, said = _run(*apt, "install", "--no-install-recommends", *lacking, environ=environ)
    if status or _lacking(packages):
        raise Unavailable(f"`apt-get install {' '.join(lacking)}` failed: {_tail(said, 5)}")


def _lacking(packages: Sequence[str]) -> list[str]:
    return [
        name
        for name in packages
        if not all(shutil.which(file, path=_PATH) or Path(file).exists() for file in PACKAGES[name])
    ]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One cluster starts or stops at a time: they share munged, /etc/hosts and the machine's ports."""
    with _HOSTS.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start(folder: Path) -> None:
    for name in _IN_FOLDER:
        (folder / name).mkdir(parents=True)
    # For device files, and only for them, SLURM sets CUDA_VISIBLE_DEVICES as it does for real GPUs.
    (folder / "gpu" / "gpu0").symlink_to("/dev/null")
    (folder / "gpu" / "gpu1").symlink_to("/dev/zero")
    _configure(folder)
    _name_nodes(folder)
    try:
        _start_munge()
        _daemon(folder, "slurmctld")
        for node in NODES:
            _daemon(folder, "slurmd", "-N", node)
        if not _within(PATIENCE, lambda: set(node_states(folder).values()) == {"idle"}):
            raise ClusterError(f"after {PATIENCE} s the nodes are not idle: {node_states(folder)}\n{_logs(folder)}")
    except ClusterError:
        _stop(folder)
        raise


def _configure(folder: Path) -> None:
    ports = list(islice(filter(_is_free, count(_FIRST_PORT)), 1 + len(NODES)))
    values = {
        "folder": folder,
        "ports": ports,
        "host": socket.gethostname().split(".")[0],
        # Jobs of two clusters have different numbers, and so do the ports that follow from a job's number.
        "first_job": 1 + 10_000 * (ports[0] - _FIRST_PORT),
        "true": shutil.which("true", path=_PATH),
    }
    for name, text in _FILES.items():
        (folder / name).write_text(text.format(**values))
    source = Path(__file__).with_name("pyxis_stand_in.c")
    status, said = _run("cc", "-shared", "-fPIC", "-o", f"{folder}/run/pyxis_stand_in.so", str(source))
    if status:
        raise ClusterError(f"{source.name} does not compile: {said}")


def _is_free(port: int) -> bool:
    with socket.socket() as server, contextlib.suppress(OSError):
        server.bind(("", port))
        return True
    return False


def _stop(folder: Path) -> None:
    conf = folder / "slurm.conf"
    if " is UP" in ask(conf, "scontrol", "ping"):
        with contextlib.suppress(ClusterError):  # what does not end is killed with the daemons
            cancel(conf)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        _within(10, lambda: not processes(folder))
    _unname_nodes(folder)
    if not any(_MARK in line for line in _HOSTS.read_text().splitlines()):
        _stop_munge()
    for name in {Path(name).parts[0] for name in _IN_FOLDER}:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else may lie in a folder that a person named
        folder.rmdir()


def _daemon(folder: Path, *command: str) -> None:
    conf = folder / "slurm.conf"
    status, said = _run(*command, "-f", str(conf), environ=_environ(conf))
    if status:
        raise ClusterError(f"{' '.join(command)} ended with exit status {status}: {said}\n{_logs(folder)}")


def _start_munge() -> None:
    if _run("munge", "--no-input")[0] == 0:
        return  # somebody's munged runs
    for path, mode in _MUNGE_FOLDERS.items():
        Path(path).mkdir(exist_ok=True)
        Path(path).chmod(mode)
        shutil.chown(path, "munge", "munge")
    if not _MUNGE_KEY.exists():
        _run("mungekey", "--create", f"--keyfile={_MUNGE_KEY}", user="munge")
    status, said = _run("munged", f"--pid-file={_MUNGE_PID}", user="munge")
    if status:
        raise ClusterError(f"munged ended with exit status {status}: {said}")


def _stop_munge() -> None:
    with contextlib.suppress(psutil.Error):
        munged = psutil.Process(_pid(_MUNGE_PID))
        if munged.name() == "munged":
            munged.terminate()
            munged.wait(10)
    _MUNGE_PID.unlink(missing_ok=True)


def _name_nodes(folder: Path) -> None:
    """Let the names of the nodes resolve, for MASTER_ADDR; the line also says which clusters the machine has."""
    before = _HOSTS.read_text()
    separator = "" if before.endswith("\n") or not before else "\n"
    _HOSTS.write_text(f"{before}{separator}127.0.0.1 {' '.join(NODES)} {_MARK}{folder}\n")


def _unname_nodes(folder: Path) -> None:
    """Take out the line of ``folder``, and those of clusters that did not live to do it themselves."""
    before = _HOSTS.read_text().splitlines(keepends=True)
    marked = [line.partition(_MARK)[2].strip() for line in before]
    gone = {path for path in marked if path and (Path(path) == folder or not processes(Path(path)))}
    after = [line for line, path in zip(before, marked, strict=True) if path not in gone]
    if after != before:
        _HOSTS.write_text("".join(after))  # in place: in a container the file is a mount


def _pid(path: Path) -> int:
    """The number in a pid file; 0 where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _environ(conf: Path) -> dict[str, str]:
    """What the daemons and the commands get: nothing of the job, the test or the shell that asks."""
    return {"PATH": _PATH, "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8", "SLURM_CONF": str(conf)}


def _run(*command: str, environ: dict[str, str] | None = None, user: str | None = None) -> tuple[int, str]:
    """Exit status and output. The output goes through a file, for a daemon may keep a pipe open."""
    with TemporaryFile("w+") as output:
        status = subprocess.run(
            [shutil.which(command[0], path=_PATH) or command[0], *command[1:]],
            env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            user=user, group=user, extra_groups=[] if user else None, cwd="/", check=False,
        ).returncode  # fmt: skip
        output.seek(0)
        return status, output.read().strip()


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.2)
    return met


def _logs(folder: Path) -> str:
    return "\n".join(f"{path}:\n{_tail(path.read_text(), 10)}" for path in sorted((folder / "log").glob("*.log")))


def _tail(text: str, lines: int) -> str:
    return "\n".join(text.splitlines()[-lines:])


_NEXT = """\
n1 and n2 are idle. In this shell:

  export SLURM_CONF={conf}

and then, for example:

  .venv/bin/python train.py cluster=slurm model=gpt_tiny parallel=ddp,pdp,fsdp
  srun -N2 --ntasks-per-node=2 .venv/bin/python train.py model=gpt_tiny parallel=fsdp

`make slurm-down` stops it."""


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm_cluster", description="a SLURM of two nodes, here")
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    asked = parser.parse_args()
    try:
        if asked.action == "up":
            print(_NEXT.format(conf=up(asked.folder)))
            try:
                install("openmpi-bin")
            except Unavailable as error:
                print(f"There is no Open MPI for `salloc -N2 mpirun ...`: {error}")
        elif reason := missing():
            raise Unavailable(reason)
        else:
            down(asked.folder)
    except ClusterError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
