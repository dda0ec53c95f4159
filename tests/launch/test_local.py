"""Local ranks: their place, their environment, and that none of them outlives its purpose."""

import errno
import itertools
import json
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ptdbench.launch import local
from ptdbench.launch.world import discover
from ptdbench.problems import ConfigError
from tests.conftest import ROOT
from tests.programs import until

pytestmark = pytest.mark.ranks


def tell(environ: dict[str, str], folder: Path) -> None:
    world = discover(os.environ)
    seen = {"rank": world.rank, "size": world.size, "mark": os.environ.get("MARK")}
    (folder / f"{world.rank}.json").write_text(json.dumps(seen))


def fail_with(environ: dict[str, str], status: int) -> None:
    if os.environ["RANK"] == "1":
        os._exit(status)
    time.sleep(3600)


def test_ranks_get_their_place_and_the_current_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", "of the server")
    local.start(tell, 1, tmp_path)  # the fork server is up now at the latest
    monkeypatch.setenv("MARK", "set later")
    local.start(tell, 3, tmp_path)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert told == [{"rank": rank, "size": 3, "mark": "set later"} for rank in range(3)]


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_ignored_sighup_stays_ignored(before):
    was = signal.signal(signal.SIGHUP, before)
    try:
        with local.stopping():
            assert (signal.getsignal(signal.SIGHUP) is local._stop) == (before is signal.SIG_DFL)
            assert signal.getsignal(signal.SIGTERM) is local._stop
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, was)


def test_missing_or_too_long_temporary_folder_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / (100 * "x")))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / (100 * "x")).mkdir()
    with pytest.raises(ConfigError, match=r"^TMPDIR=.*x: AF_UNIX path too long; set it to a folder "):
        local.check_sockets()
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "file")])
    monkeypatch.setenv("TMPDIR", "/full")
    with pytest.raises(ConfigError, match=r"^TMPDIR=/full: No usable temporary directory found in .*; set it "):
        local.check_sockets()


def leave_behind(environ: dict[str, str], folder: Path) -> None:
    """In a rank: fork twice, so that the grandchild is an orphan that hears no SIGTERM."""
    if os.fork() == 0:
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (folder / "pid").write_text(str(os.getpid()))
            time.sleep(3600)
        os._exit(0)
    os.wait()
    until(lambda: (pid := folder / "pid").exists() and pid.read_text())


def test_orphan_of_a_rank_is_ended(tmp_path, monkeypatch):
    """Only processes show it: an orphan has to find a parent that knows of it."""
    monkeypatch.setattr(local, "ORPHAN_SECONDS", 0.2)
    local.start(leave_behind, 1, tmp_path)
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def leave_compiling(environ: dict[str, str], folder: Path) -> None:
    """In a rank: start what is called as torch's compile worker and has a compiler of its own."""
    worker = folder / "torch" / "_inductor" / "compile_worker" / "__main__.py"
    worker.parent.mkdir(parents=True)
    worker.write_text("import subprocess; subprocess.run(['sleep', '3600'])")
    pid = subprocess.Popen([sys.executable, str(worker)]).pid
    compiler = until(psutil.Process(pid).children)[0]
    for one in (pid, compiler.pid):
        (folder / f"{one}.pid").write_text(str(one))


def test_compile_worker_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "ORPHAN_SECONDS", 0.2)
    local.start(leave_compiling, 1, tmp_path)
    assert len(list(tmp_path.glob("*.pid"))) == 2
    assert_gone(tmp_path)


def test_death_of_a_rank_ends_its_peers_and_restores_signal_handlers():
    before = [signal.getsignal(getattr(signal, name)) for name in local.STOP_SIGNALS]
    with pytest.raises(local.RankDied) as caught:
        local.start(fail_with, 2, 7)
    assert caught.value.exit_codes == {1: 7}
    assert [signal.getsignal(getattr(signal, name)) for name in local.STOP_SIGNALS] == before


def be_asked_to_stop(environ: dict[str, str], folder: Path, parent: int, name: str, times: int, how: str) -> None:
    """In a rank: ask the parent to stop; then the rank does what ``how`` says: ``end``, ``ignore`` it or ``die``."""
    heard: list[int] = []
    rank = os.environ["RANK"]
    for signal_name in local.STOP_SIGNALS:
        signal.signal(getattr(signal, signal_name), signal.SIG_DFL if how == "die" else lambda n, _: heard.append(n))
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    until(lambda: len(list(folder.glob("*.pid"))) == 2)
    for _ in range(times if rank == "0" else 0):
        os.kill(parent, getattr(signal, name))
        time.sleep(0.3)  # equal signals that wait to be delivered are one
    while how != "end" or not heard:
        time.sleep(0.01)
    (folder / f"{rank}.heard").write_text(str([signal.Signals(number).name for number in heard]))


class TestGrace:
    def ask(self, folder: Path, name: str, times: int, how: str, grace: float) -> None:
        with pytest.raises(local.Stopped, match=name):
            local.start(be_asked_to_stop, 2, folder, os.getpid(), name, times, how, grace=grace)
        pids = [int(path.read_text()) for path in folder.glob("*.pid")]
        assert len(pids) == 2
        assert not any(psutil.pid_exists(pid) for pid in pids)

    def test_signal_is_forwarded_once(self, tmp_path):
        self.ask(tmp_path, "SIGINT", 2, "end", 3600)
        assert [path.read_text() for path in tmp_path.glob("*.heard")] == ["['SIGINT']"] * 2

    @pytest.mark.parametrize(("name", "times", "how", "grace"), [
        ("SIGTERM", 1, "ignore", 0.5),  # ranks that need longer are killed
        ("SIGINT", 20, "ignore", 3600),  # as the third Ctrl-C does at once
        ("SIGTERM", 1, "die", 3600),  # a rank that fails meanwhile does not hide that we were asked
        ("SIGUSR2", 1, "ignore", 0.0),
    ])  # fmt: skip
    def test_ranks_still_running_are_killed(self, tmp_path, monkeypatch, name, times, how, grace):
        monkeypatch.setattr(local, "END_SECONDS", 5.0 if grace else 0.5)
        self.ask(tmp_path, name, times, how, grace)


def carrying(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if mark in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_killed_train_py_leaves_no_process(tmp_path):
    environ = {**os.environ, "PTDBENCH_TEST_MARK": (mark := uuid.uuid4().hex)}
    command = [sys.executable, str(ROOT / "train.py"), "model=toy", "train.steps=1000000", "train.max_minutes=null"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any("  step " in line for line in process.stderr)
            assert len(carrying(mark)) >= 4  # itself, the fork server and two ranks
        finally:
            process.kill()
    assert not psutil.wait_procs(carrying(mark), timeout=30)[1]


def server_pid() -> int:
    return multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def lose_the_server(environ: dict[str, str], folder: Path, server: int) -> None:
    """In a rank: rank 1 ends the process that both were forked from; nothing else would end them."""
    (folder / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    until(lambda: len(list(folder.glob("*.pid"))) == 2)
    if os.environ["RANK"] == "1":
        os.kill(server, signal.SIGKILL)
    time.sleep(3600)


def test_ranks_end_with_their_fork_server_and_the_next_get_another(tmp_path):
    local.start(tell, 1, tmp_path)
    with pytest.raises(local.LaunchError, match=r"the fork server, .* has ended .*, and the ranks with it"):
        local.start(lose_the_server, 2, tmp_path, server_pid())
    assert_gone(tmp_path)
    assert psutil.Process(server_pid()).status() == psutil.STATUS_ZOMBIE  # multiprocessing reaps it
    local.start(tell, 2, tmp_path)
    assert (tmp_path / "1.json").exists()


def wait_alone(environ: dict[str, str], folder: Path) -> None:
    (folder / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    time.sleep(3600)


def assert_gone(folder: Path) -> None:
    """Ranks that got as far as to write down their process ids are no more."""
    pids = [int(text) for text in (path.read_text() for path in folder.glob("*.pid")) if text]
    until(lambda: not any(map(psutil.pid_exists, pids)), 30)


@pytest.mark.parametrize(("error", "reason"), [
    (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "Resource temporarily unavailable"),
    (EOFError("unexpected EOF"), local._SERVER_ENDED),  # instead of the process id that it was to tell
])  # fmt: skip
def test_started_ranks_end_where_another_cannot_start(tmp_path, monkeypatch, error, reason):
    start, count = multiprocessing.process.BaseProcess.start, itertools.count()

    def refuse(process: multiprocessing.process.BaseProcess) -> None:
        if next(count) == 1:
            raise error
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    with pytest.raises(local.LaunchError) as caught:
        local.start(wait_alone, 2, tmp_path)
    assert str(caught.value) == f"the ranks could not be started: {reason}"
    assert multiprocessing.active_children() == []
    assert_gone(tmp_path)


def test_rank_without_server_or_starter_ends_itself(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(local, "die_with_parent", lambda: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    for server, starter_lives in ((os.getppid(), True), (2**22, True), (os.getppid(), False)):
        monkeypatch.setitem(sys.modules, "ptdbench.launch.preload", SimpleNamespace(SERVER=server))
        starter = SimpleNamespace(is_alive=lambda lives=starter_lives: lives)
        monkeypatch.setattr(multiprocessing, "parent_process", lambda starter=starter: starter)
        local._die_with_server()
        ended.append(0)
    assert ended == [0, 1, 0, 1, 0]


def test_ctrl_c_while_the_fork_server_imports_shows_no_traceback():
    program = "import os, signal, ptdbench.launch.preload; os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def test_another_thread_leaves_signals_to_its_program():
    handlers = [signal.getsignal(signal.SIGTERM)]

    def work() -> None:
        with local.handling(lambda *_: None):
            local.ignore_signals()
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == handlers[:1] * 2
