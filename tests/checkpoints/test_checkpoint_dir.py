"""What a manifest says, which checkpoint counts, which are deleted, and what a kill at any moment leaves."""

import hashlib
import json
import math
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ptdbench.checkpoints import checkpoint_dir, saver
from ptdbench.checkpoints.checkpoint_dir import BrokenCheckpoint, Manifest, Stamp
from ptdbench.checkpoints.state import load_tensors
from ptdbench.launch import local
from tests.daily import cases
from tests.parallel.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("alone")

CONTENT = b"0123456789" * 1000


@pytest.fixture
def written(tmp_path: Path) -> Manifest:
    names = ("__0_0.distcp", "__1_0.distcp", ".metadata")
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(CONTENT[number:])
    files = {name: checkpoint_dir.stamp(tmp_path / name) for name in names}
    described = Manifest(7, 2, {"width": 16}, {"losses": [0.1, 1e-17, 3.0]}, files, "2.15.0", 1234.5)
    checkpoint_dir.write_manifest(tmp_path, described)
    return described


def test_stamp_is_size_and_sha256(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT * 500)  # more than one block
    assert checkpoint_dir.stamp(tmp_path / "file") == Stamp(5_000_000, hashlib.sha256(CONTENT * 500).hexdigest())


def test_manifest_is_read_as_written_in_strict_json(tmp_path, written):
    assert checkpoint_dir.read_manifest(tmp_path) == written
    assert checkpoint_dir.verify(tmp_path) == written
    facts = {"loss": math.nan, "scale": math.inf, "pair": (1, 2)}
    checkpoint_dir.write_manifest(tmp_path, Manifest(7, 2, {}, facts, {}, "2.15.0", 1.0))
    assert checkpoint_dir.read_manifest(tmp_path).facts == {"loss": None, "scale": None, "pair": [1, 2]}
    json.loads((tmp_path / "manifest.json").read_text(), parse_constant=pytest.fail)
    with pytest.raises(TypeError):
        checkpoint_dir.write_manifest(tmp_path, Manifest(7, 2, {}, {"what": object()}, {}, "2.15.0", 1.0))


def broken(check: object, *arguments: object) -> str:
    with pytest.raises(BrokenCheckpoint) as caught:
        check(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(("content", "told"), [
    *((content, "manifest.json is not a manifest") for content in ("", '{"step": 7, "wor', "[]", "{}")),
    ('{"sha256": "00", "step": 7}', "manifest.json does not match its checksum"),
])  # fmt: skip
def test_malformed_manifest_is_broken(tmp_path, written, content, told):
    (tmp_path / "manifest.json").write_text(content)
    assert broken(checkpoint_dir.read_manifest, tmp_path) == told


def test_flipped_bit_of_a_manifest_is_noticed(tmp_path, written):
    path = tmp_path / "manifest.json"
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        try:
            assert checkpoint_dir.read_manifest(tmp_path) == written  # white space may change
        except BrokenCheckpoint:
            continue
        assert content[position : position + 1] in b" \n"


@pytest.mark.parametrize("other", [
    {"model": []}, {"model": None}, {"facts": []}, {"facts": {"segments": 3}}, {"facts": {"evaluations": [1]}},
    {"facts": {"scaler": []}}, {"step": "7"}, {"step": -1}, {"world_size": True}, {"torch": ...},
    {"files": {"__0_0.distcp": {"bytes": "1", "sha256": "00"}}},
], ids=str)  # fmt: skip
def test_manifest_with_wrong_types_is_broken(tmp_path, written, other):
    body = json.loads((tmp_path / "manifest.json").read_text()) | other
    body = {name: value for name, value in body.items() if name != "sha256" and value is not ...}
    (tmp_path / "manifest.json").write_text(json.dumps(body | {"sha256": checkpoint_dir._digest(body)}))
    assert broken(checkpoint_dir.read_manifest, tmp_path) == "manifest.json is not a manifest"


def test_manifest_cannot_name_files_elsewhere(tmp_path, written):
    checkpoint_dir.write_manifest(tmp_path, Manifest(7, 2, {}, {}, {"../file": Stamp(0, "")}, "2.15.0", 1.0))
    assert broken(checkpoint_dir.verify, tmp_path) == "../file is not a file name"


def make(run_directory: Path, step: int, files: int = 3) -> Path:
    """A checkpoint as the saver leaves it, with files of any content."""
    partial = checkpoint_dir.partial(run_directory, step)
    checkpoint_dir.begin(partial)
    for number in range(files):
        (partial / f"__{number}_0.distcp").write_bytes(bytes([step, number]) * 1000)
    stamps = {path.name: checkpoint_dir.stamp(path) for path in partial.iterdir()}
    checkpoint_dir.write_manifest(partial, Manifest(step, files, {}, {"of": step}, stamps, "2.15.0", 1.0))
    return checkpoint_dir.publish(partial)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def names(run_directory: Path) -> list[str]:
    return sorted(path.name for path in (run_directory / "checkpoints").iterdir())


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda path: os.truncate(path / "__1_0.distcp", 1234), "__1_0.distcp has 1234 bytes instead of 2000"),
    "a file gone": (
        lambda path: (path / "__1_0.distcp").unlink(), "cannot read __1_0.distcp (No such file or directory)",
    ),
    "bit flipped": (lambda path: flip(path / "__2_0.distcp"), "__2_0.distcp does not match its checksum"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
}  # fmt: skip


class TestNewest:
    def test_newest_has_the_highest_step(self, tmp_path):
        assert checkpoint_dir.newest(tmp_path) == checkpoint_dir.NewestCheckpoint(None, {})
        for step in (9, 2, 10, 3):
            make(tmp_path, step)
        newest = checkpoint_dir.newest(tmp_path).checkpoint
        assert (newest.path.name, newest.manifest.facts) == ("step-00000010", {"of": 10})
        make(tmp_path, 99).rename(tmp_path / "checkpoints" / "step-99999999")
        make(tmp_path, 1).rename(tmp_path / "checkpoints" / "step-100000000")
        assert checkpoint_dir.newest(tmp_path).checkpoint.path.name == "step-100000000"

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_broken_checkpoint_is_skipped_with_a_warning(self, tmp_path, damage):
        whole, wrong = make(tmp_path, 1), make(tmp_path, 2)
        break_it, told = DAMAGES[damage]
        break_it(wrong)
        search = checkpoint_dir.newest(tmp_path)
        assert search.checkpoint.path == whole
        (warning,) = search.warnings
        assert warning.startswith(f"skipping {wrong}: {told}")
        break_it(whole)
        search = checkpoint_dir.newest(tmp_path)
        assert search.checkpoint is None
        assert [warning.split(": ")[0] for warning in search.warnings] == [f"skipping {wrong}", f"skipping {whole}"]

    def test_partial_and_foreign_folders_are_ignored(self, tmp_path):
        whole = make(tmp_path, 1)
        make(tmp_path, 2).rename(checkpoint_dir.partial(tmp_path, 2))
        for stranger in ("step-3", "notes", "step-00000004.deleted"):
            (tmp_path / "checkpoints" / stranger).mkdir()
        (tmp_path / "checkpoints" / "step-00000005").write_text("a file")
        assert checkpoint_dir.newest(tmp_path) == checkpoint_dir.NewestCheckpoint(
            checkpoint_dir.Checkpoint(whole, checkpoint_dir.read_manifest(whole)), {}
        )


def search_on_ranks(run_directory: Path) -> tuple[checkpoint_dir.NewestCheckpoint, list[str]]:
    """What this rank finds, and which files it read."""
    read: list[str] = []
    stamp = checkpoint_dir.stamp
    checkpoint_dir.stamp = lambda path: read.append(str(path.relative_to(path.parents[1]))) or stamp(path)
    return checkpoint_dir.newest(run_directory, dist.new_group(backend="gloo")), read


@pytest.mark.ranks
def test_ranks_share_the_reading_and_agree(tmp_path):
    whole, wrong = make(tmp_path, 1), make(tmp_path, 2)
    flip(wrong / "__1_0.distcp")  # which only the second rank reads
    (first, read_by_first), (second, read_by_second) = on_ranks(2, search_on_ranks, tmp_path)
    assert first == second
    assert first.checkpoint.path == whole
    assert first.broken == {wrong: "__1_0.distcp does not match its checksum"}
    both = [f"{path.name}/__{number}_0.distcp" for path in (wrong, whole) for number in range(3)]
    assert sorted(read_by_first + read_by_second) == sorted(both)
    assert {name for name in read_by_second if "00001/" in name} == {"step-00000001/__1_0.distcp"}


class TestPrune:
    def test_newest_stay_and_partial_ones_do_not_count(self, tmp_path):
        for step in range(1, 6):
            make(tmp_path, step)
        checkpoint_dir.begin(checkpoint_dir.partial(tmp_path, 6))
        # As a process leaves it that is killed while it notes an evaluation.
        (tmp_path / "checkpoints" / "step-00000001" / ".manifest.json.0f1e2d3c.tmp").write_text("{")
        checkpoint_dir.prune(tmp_path, 2)
        assert names(tmp_path) == ["step-00000004", "step-00000005", "step-00000006.partial"]

    @pytest.mark.parametrize("damage", ["truncated", "no manifest"])
    def test_broken_ones_do_not_count(self, tmp_path, damage):
        for step in range(1, 6):
            made = make(tmp_path, step)
            if step > 2:
                DAMAGES[damage][0](made)
        checkpoint_dir.prune(tmp_path, 2)
        assert names(tmp_path) == [f"step-0000000{step}" for step in range(1, 6)]

    @pytest.mark.parametrize("stranger", ["notes.txt", "__9_0.distcp"])
    def test_checkpoint_with_foreign_files_stays(self, tmp_path, stranger):
        for step in (1, 2):
            put(make(tmp_path, step), stranger)
        for step in (11, 12, 13, 14):
            make(tmp_path, step)
        before = contents(tmp_path)
        checkpoint_dir.prune(tmp_path, 2)
        stay = ("step-00000001", "step-00000002", "step-00000013", "step-00000014")
        assert contents(tmp_path) == {path: held for path, held in before.items() if Path(path).parts[0] in stay}

    def test_linked_checkpoint_stays(self, tmp_path):
        """A person has moved it to another disk, and left a link."""
        elsewhere = make(tmp_path, 1).rename(tmp_path / "elsewhere")
        (tmp_path / "checkpoints" / "step-00000001").symlink_to(elsewhere)
        make(tmp_path, 2)
        before = contents(tmp_path)
        checkpoint_dir.prune(tmp_path, 1)
        assert contents(tmp_path) == before


def put(directory: Path, stranger: str) -> None:
    """Something that the saver has not written; an empty folder is one too."""
    if stranger.endswith("/"):
        (directory / stranger).mkdir()
    elif stranger == "link":
        (directory / "__8_0.distcp").symlink_to("__0_0.distcp")
    else:
        (directory / stranger).write_text("mine")


def contents(run_directory: Path) -> dict[str, bytes | str | None]:
    """Every name among the checkpoints with what is there: a file's bytes, where a link leads, nothing for a folder."""
    folder = run_directory / "checkpoints"

    def held(path: Path) -> bytes | str | None:
        return os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None

    return {str(path.relative_to(folder)): held(path) for path in folder.rglob("*")}


class TestSweepPartial:
    def test_unfinished_checkpoint_is_removed_and_a_complete_one_named(self, tmp_path):
        checkpoint_dir.remove_partial(tmp_path)
        assert list(tmp_path.iterdir()) == []  # without checkpoints there is nothing to do
        make(tmp_path, 1)
        checkpoint_dir.begin(partial := checkpoint_dir.partial(tmp_path, 2))
        for name in (
            "__12_0.distcp", ".metadata", ".metadata.tmp", "manifest.json", ".manifest.json.0f1e2d3c.tmp",
        ):  # fmt: skip
            (partial / name).write_bytes(b"half")
        (tmp_path / "checkpoints" / "step-00000003.deleted").mkdir()
        checkpoint_dir.remove_partial(tmp_path)
        assert names(tmp_path) == ["step-00000001"]
        made = make(tmp_path, 2)
        made.rename(checkpoint_dir.partial(tmp_path, 2))
        checkpoint_dir.remove_partial(tmp_path)
        assert checkpoint_dir.newest(tmp_path).checkpoint.path == made

    @pytest.mark.parametrize("end", [".partial", ".deleted"])
    def test_leftover_with_foreign_files_stays(self, tmp_path, end):
        folder = tmp_path / "checkpoints"
        put(make(tmp_path, 2).rename(folder / f"step-00000002{end}"), "notes.txt")
        for other in (f"step-mine{end}", f"step-3{end}"):
            (folder / other).mkdir()
        (folder / f"step-00000004{end}").write_text("mine")
        before = contents(tmp_path)
        make(tmp_path, 5).rename(folder / f"step-00000006{end}")
        checkpoint_dir.remove_partial(tmp_path)
        assert {path: held for path, held in contents(tmp_path).items() if "00006" not in path} == before
        assert (folder / "step-00000006").exists() == (end == ".partial")


class TestInTheWay:
    """What is a person's is neither overwritten nor emptied by the next save of the same step."""

    @pytest.mark.parametrize("stranger", ["notes.txt", "plots/", "link"])
    def test_partial_with_foreign_files_is_not_emptied(self, tmp_path, stranger):
        checkpoint_dir.begin(partial := checkpoint_dir.partial(tmp_path, 1))
        (partial / "__0_0.distcp").write_bytes(b"half")
        put(partial, stranger)
        before = contents(tmp_path)
        with pytest.raises(FileExistsError, match="was not created by ptdbench: move it elsewhere"):
            checkpoint_dir.begin(partial)
        assert contents(tmp_path) == before

    @pytest.mark.parametrize("place", ["step-00000001", "step-00000001.deleted"])
    def test_same_step_with_foreign_files_is_not_replaced(self, tmp_path, place):
        make(tmp_path, 1)
        (tmp_path / "checkpoints" / place).mkdir(exist_ok=True)
        put(tmp_path / "checkpoints" / place, "notes.txt")
        before = contents(tmp_path)
        with pytest.raises(FileExistsError, match=r"notes.txt was not created by ptdbench"):
            make(tmp_path, 1)
        checkpoint_dir.discard(checkpoint_dir.partial(tmp_path, 1))
        assert contents(tmp_path) == before

    def test_file_added_during_deletion_stays(self, tmp_path, monkeypatch):
        make(tmp_path, 1)
        make(tmp_path, 2)
        unlink = Path.unlink

        def and_put(path: Path) -> None:
            put(path.parent, "notes.txt")
            unlink(path)

        monkeypatch.setattr(Path, "unlink", and_put)
        with pytest.raises(OSError, match="not empty"):
            checkpoint_dir.prune(tmp_path, 1)
        left = "step-00000001.deleted"
        assert {path for path in contents(tmp_path) if "00001" in path} == {left, f"{left}/notes.txt"}


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying_after(owner: Any, name: str) -> None:
    """Let a function kill this process when its work is done."""
    work = getattr(owner, name)
    setattr(owner, name, lambda *given, **named: die(work(*given, **named)))


def save_and_die(environ: Mapping[str, str], run_directory: Path, place: str) -> None:
    """Save after step 1 and again after step 2, where the process is killed at some place."""
    dist.init_process_group("gloo")
    keeper = saver.Saver(run_directory, keep=1)
    keeper.save(1, {"model.weight": torch.ones(1000), "model.bias": torch.ones(10)}, {}, {})
    keeper.wait()
    PLACES[place][0]()
    keeper.save(1 if "same step" in place else 2, {"model.weight": torch.zeros(1000)}, {}, {})
    keeper.wait()


#: What breaks there, and the step that counts before and after the next start has cleaned up.
PLACES: dict[str, tuple[Callable[[], Any], int | None, int]] = {
    "writing tensors": (lambda: dying_after(torch, "save"), 1, 1),
    "before the manifest": (lambda: setattr(checkpoint_dir, "write_manifest", die), 1, 1),
    "before the name": (lambda: setattr(checkpoint_dir, "publish", die), 1, 2),
    "deleting the older": (
        lambda: setattr(checkpoint_dir, "remove", lambda path, _: (next(path.iterdir()).unlink(), die())), 2, 2,
    ),
    "same step": (lambda: dying_after(checkpoint_dir, "_set_aside"), None, 1),
}  # fmt: skip


@pytest.mark.ranks
@cases("place", PLACES, daily=["before the manifest", "same step"])
def test_killed_save_leaves_a_complete_checkpoint(tmp_path, place):
    with pytest.raises(local.RankDied) as caught:
        local.start(save_and_die, 1, tmp_path, place)
    assert caught.value.exit_codes == {0: -signal.SIGKILL}
    _, before, after = PLACES[place]
    search = checkpoint_dir.newest(tmp_path)
    assert (search.warnings, search.checkpoint and search.checkpoint.manifest.step) == ([], before)
    checkpoint_dir.remove_partial(tmp_path)
    search = checkpoint_dir.newest(tmp_path)
    assert (search.warnings, search.checkpoint.manifest.step) == ([], after)
    assert not any("." in name for name in names(tmp_path))
    weight = {"model.weight": torch.full((1000,), 7.0)}
    load_tensors(search.checkpoint.path, weight)
    renewed = after == 2 or place == "same step"
    assert torch.equal(weight["model.weight"], (torch.zeros if renewed else torch.ones)(1000))
