import http.server
import json
import multiprocessing
import os
import pickle
import shutil
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torchvision.datasets import utils

from ptdbench.data.archive import Archive
from ptdbench.data.cifar10 import Cifar10
from ptdbench.problems import ConfigError
from tests.data import small_cifar10
from tests.data.small_cifar10 import ARCHIVE, FOLDER, SmallCifar10

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
LOCK = f"{FOLDER}.lock"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No test may reach the cache of whoever runs it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "ptdbench"


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "cifar"
    small_cifar10.write(root)
    return root


def small(root, **options):
    return SmallCifar10(**{"seed": 3, "root": str(root)} | options)


def prepared(root, **options):
    data = small(root, **options)
    data.prepare()
    return data


def refusals(**options):
    with pytest.raises(ConfigError) as caught:
        Cifar10(**{"seed": 0} | options)
    return caught.value.problems


def refused_at_prepare(data):
    with pytest.raises(ConfigError) as caught:
        data.prepare()
    (problem,) = caught.value.problems
    return problem


def pixels(images):
    """Back to bytes."""
    values = (images * STD + MEAN) * 255
    assert torch.allclose(values, values.round(), atol=1e-3)
    return values.round().to(torch.uint8)


def names(folder):
    """What lies in a folder, but not the checksums of the tests."""
    return {path.name for path in Path(folder).iterdir()} - {"small-cifar-10.json"}


class TestSamples:
    def test_are_the_images_of_the_archive_with_their_labels(self, root):
        images, labels = prepared(root, padding=0, flip=False).samples(0, 200)
        assert (images.shape, images.dtype, labels.dtype) == ((200, 3, 32, 32), torch.float32, torch.int64)
        red, green, blue = pixels(images).unbind(1)
        assert torch.equal(red, (10 * labels).to(torch.uint8).view(-1, 1, 1).expand(-1, 32, 32))
        assert sorted(blue[:, 0, 0].tolist()) == sorted([*range(40)] * 5)
        assert len(green.flatten(1).unique(dim=0)) == 200

    def test_rows_are_rows(self, root):
        """The format has red row by row, then green, then blue."""
        stored = pickle.loads(small_cifar10.batches(40, 20)["test_batch"])["data"]
        images, _ = prepared(root).held_out.samples(0, 20)
        assert (pixels(images).numpy() == stored.reshape(20, 3, 32, 32)).all()

    def test_each_image_comes_once_an_epoch(self, root):
        data = prepared(root, padding=0, flip=False)
        epochs = [pixels(data.samples(start, start + 200)[0]).flatten(1) for start in (0, 200)]
        assert not torch.equal(*epochs)
        assert torch.equal(*(epoch.unique(dim=0) for epoch in epochs))

    def test_are_moved_and_mirrored_as_they_are_asked_to_be(self, root):
        plain = prepared(root, padding=0, flip=False).samples(0, 200)[0]
        moved, mirrored, both = (
            prepared(root, **options).samples(0, 200)[0]
            for options in ({"flip": False, "padding": 1}, {"padding": 0}, {})
        )
        changed = (mirrored != plain).flatten(1).any(1)
        assert torch.equal(mirrored[changed], plain[changed].flip(-1))
        assert 60 < changed.sum() < 140
        black = (torch.zeros(3, 1, 1) - MEAN) / STD
        edges = [torch.isclose(moved[..., place, :], black[..., 0]).all((1, 2)).sum() for place in (0, -1)]
        assert all(30 < edge < 110 for edge in edges), "about a third is moved up, and a third down"
        assert not torch.equal(both, moved)


class TestHeldOut:
    def test_is_the_test_images_in_their_order_as_they_are(self, root):
        held_out = prepared(root).held_out
        assert len(held_out) == 20
        images, labels = held_out.samples(5, 20)
        assert labels.tolist() == [n % 10 for n in range(5, 20)]
        assert pixels(images)[:, 2, 0, 0].tolist() == list(range(5, 20))
        assert torch.equal(images, small(root, seed=9).held_out.samples(5, 20)[0])


class TestOptions:
    def test_the_reader_is_torchvisions_own(self, root):
        assert Cifar10(seed=0, root=str(root)).reader() is torchvision.datasets.CIFAR10

    def test_all_bad_ones_are_reported_at_once(self):
        problems = refusals(seed=-1, padding=-1, classes=1000, image_size=224)
        assert [p.option for p in problems] == ["seed", "padding", "root", "classes", "image_size"]
        assert [p.remedy for p in problems[3:]] == ["try model.classes=10", "try model.image_size=32"]

    @pytest.mark.parametrize("root", [None, "nowhere/at/all", __file__])
    def test_without_a_folder_it_says_what_to_do(self, root):
        (problem,) = refusals(root=root)
        assert (problem.option, problem.value) == ("root", root)
        assert "data.root=FOLDER" in problem.remedy
        assert "data.download=true" in problem.remedy

    def test_a_download_goes_to_the_users_cache_unless_it_is_told_where(self, cache, tmp_path):
        assert Cifar10(seed=0, download=True).root == cache / "cifar-10"
        assert Cifar10(seed=0, download=True, root=str(tmp_path / "new")).root == tmp_path / "new"
        assert list(tmp_path.iterdir()) == [], "a constructor is light"


class TestPreparing:
    def test_unpacks_the_archive(self, root):
        prepared(root)
        assert names(root) == {ARCHIVE, FOLDER, LOCK}
        assert names(root / FOLDER) == {*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"}

    def test_writes_nothing_where_all_is_there(self, root):
        prepared(root)
        (root / LOCK).unlink()
        (root / ARCHIVE).unlink()
        before = [path.stat().st_mtime_ns for path in (root, root / FOLDER)]
        prepared(root)
        prepared(root, download=True)
        assert names(root) == {FOLDER}
        assert [path.stat().st_mtime_ns for path in (root, root / FOLDER)] == before

    @pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
    def test_mends_a_folder_that_is_broken_and_keeps_what_is_in_it(self, root, name):
        prepared(root)
        whole = names(root / FOLDER)
        (root / FOLDER / "notes.txt").write_text("mine")
        for content in (b"broken", b"broken again"):
            (root / FOLDER / name).write_bytes(content)
            prepared(root).samples(0, 1)
        (root / FOLDER / name).unlink()
        prepared(root).samples(0, 1)
        kept = {f"{name}.broken": b"broken", f"{name}.broken1": b"broken again", "notes.txt": b"mine"}
        assert names(root / FOLDER) == {*whole, *kept}
        assert {name: (root / FOLDER / name).read_bytes() for name in kept} == kept
        assert names(root) == {ARCHIVE, FOLDER, LOCK}

    def test_says_what_to_do_where_there_is_nothing_to_unpack(self, root):
        (root / ARCHIVE).unlink()
        problem = refused_at_prepare(small(root))
        assert problem.option == "root"
        assert f"there is no {FOLDER} in it, and no {ARCHIVE}" in problem.rule
        assert "data.download=true" in problem.remedy
        assert names(root) == set()

    def test_says_that_a_folder_is_broken_where_there_is_nothing_to_replace_it(self, root):
        prepared(root)
        (root / ARCHIVE).unlink()
        (root / FOLDER / "data_batch_1").unlink()
        assert f"{FOLDER} lacks files or was changed, and no {ARCHIVE}" in refused_at_prepare(small(root)).rule

    @pytest.mark.parametrize("download", [False, True])
    def test_refuses_an_archive_that_is_truncated(self, root, download):
        md5 = json.loads((root / "small-cifar-10.json").read_text())[ARCHIVE]
        os.truncate(root / ARCHIVE, 1000)
        problem = refused_at_prepare(small(root, download=download))
        assert (problem.option, problem.value) == ("root", root)
        assert str(root / ARCHIVE) in problem.rule
        assert utils.calculate_md5(root / ARCHIVE) in problem.rule
        assert f"must be {md5}: it is truncated or was changed" in problem.rule
        assert "delete it and give data.download=true, or put a whole one there" in problem.remedy
        assert names(root) == {ARCHIVE, LOCK}

    def test_removes_what_a_killed_process_has_left(self, root, monkeypatch):
        monkeypatch.setattr("platform.node", lambda: "here")
        left = root / f"{FOLDER}.here.partial"
        left.mkdir()
        (left / "data_batch_1").write_bytes(b"half")
        prepared(root)
        assert names(root) == {ARCHIVE, FOLDER, LOCK}

    @pytest.mark.parametrize("stranger", ["notes.txt", "plots/"])
    def test_leaves_alone_what_is_a_persons(self, root, monkeypatch, stranger):
        monkeypatch.setattr("platform.node", lambda: "here")
        left = root / f"{FOLDER}.here.partial"
        left.mkdir()
        if stranger == "plots/":
            (left / stranger).mkdir()
        else:
            (left / stranger).write_text("mine")
        (left / "data_batch_1").write_bytes(b"half")
        problem = refused_at_prepare(small(root))
        assert f"{(left / stranger)} was not created by ptdbench: move it elsewhere" in problem.rule
        assert names(left) == {stranger.rstrip("/"), "data_batch_1"}

    def test_shows_no_half_unpacked_folder_and_leaves_none(self, root, monkeypatch):
        def breaks_off(self, folder):
            (folder / "data_batch_1").write_bytes(b"half")
            assert not (root / FOLDER).exists()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Archive, "_extract", breaks_off)
        problem = refused_at_prepare(small(root))
        assert problem.option == "root"
        assert "No space left" in problem.rule
        assert names(root) == {ARCHIVE, LOCK}

    def test_takes_what_another_host_has_unpacked_in_the_meantime(self, root, monkeypatch):
        extract = Archive._extract

        def slowly(self, folder):
            extract(self, folder)
            (root / FOLDER).mkdir()
            extract(self, root / FOLDER)

        monkeypatch.setattr(Archive, "_extract", slowly)
        monkeypatch.setattr(Path, "rename", None)
        prepared(root).samples(0, 1)
        assert names(root) == {ARCHIVE, FOLDER, LOCK}

    def test_blames_the_root_for_what_the_operating_system_refuses(self, root):
        (root / LOCK).mkdir()  # a mode of 555 would not stop root, whom CI often runs as
        problem = refused_at_prepare(small(root))
        assert problem.option == "root"
        assert "Is a directory" in problem.rule


def unpack(root, together, log):
    extract = Archive._extract

    def logged(self, folder):
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        threading.Event().wait(1)  # keep the other at the lock for a while
        extract(self, folder)

    Archive._extract = logged
    together.wait(60)
    prepared(root)


def test_of_two_processes_that_come_at_once_one_unpacks_and_the_other_waits(root, tmp_path):
    context = multiprocessing.get_context("fork")  # others import torch anew, and what is done here needs none of it
    log = tmp_path / "log"
    arguments = (root, context.Barrier(2), log)
    processes = [context.Process(target=unpack, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(log.read_text().splitlines()) == 1
    small(root).samples(0, 1)


class TestReading:
    def test_a_pickle_with_another_checksum_is_not_opened(self, root, tmp_path):
        class Poison:
            def __reduce__(self):
                return Path.touch, (tmp_path / "poisoned",)

        prepared(root)
        for name in ("data_batch_1", "test_batch"):
            (root / FOLDER / name).write_bytes(pickle.dumps(Poison()))
        pickle.loads((root / FOLDER / "test_batch").read_bytes())
        assert (tmp_path / "poisoned").exists(), "it would harm whoever opens it"
        (tmp_path / "poisoned").unlink()

        for read in (lambda: small(root).samples(0, 1), lambda: small(root).held_out):
            with pytest.raises(ConfigError, match="lacks files or was changed"):
                read()
        prepared(root)  # puts the right ones there
        small(root).samples(0, 1)
        assert not (tmp_path / "poisoned").exists()

    def test_the_identity_is_that_of_the_files(self, root, tmp_path):
        first = prepared(root).identity
        assert small(root, seed=7, padding=0).identity == first
        small_cifar10.write(tmp_path / "other", training=41)
        assert prepared(tmp_path / "other").identity != first
        shutil.copytree(root, tmp_path / "copy")
        assert small(tmp_path / "copy").identity == first


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of a web server, and the folder that it shows."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "web"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


class TestDownload:
    def shown(self, tmp_path, server):
        """A root whose archive is on the server only."""
        url, folder = server
        archive = small_cifar10.write(tmp_path / "new", url=f"{url}/{ARCHIVE}")
        shutil.move(archive, folder / ARCHIVE)
        return tmp_path / "new", folder / ARCHIVE

    def test_brings_the_archive_and_unpacks_it(self, tmp_path, server):
        root, _ = self.shown(tmp_path, server)
        prepared(root, download=True).samples(0, 1)
        assert names(root) == {ARCHIVE, FOLDER, LOCK}

    def test_is_not_done_unless_it_is_asked_for(self, tmp_path, server):
        root, _ = self.shown(tmp_path, server)
        refused_at_prepare(small(root))
        assert names(root) == set()

    def test_is_not_done_where_there_is_an_archive(self, root):
        prepared(root, download=True)  # from an address at which nobody listens

    def test_of_a_changed_file_leaves_nothing(self, tmp_path, server):
        root, shown = self.shown(tmp_path, server)
        shown.write_bytes(shown.read_bytes()[:-1])
        problem = refused_at_prepare(small(root, download=True))
        assert problem.option == "download"
        assert "corrupted" in problem.rule
        assert names(root) == {LOCK}

    def test_that_fails_says_why_and_leaves_nothing(self, tmp_path, server):
        root, shown = self.shown(tmp_path, server)
        shown.unlink()
        problem = refused_at_prepare(small(root, download=True))
        assert (problem.option, problem.value) == ("download", True)
        assert f"/{ARCHIVE} could not be downloaded: HTTP Error 404" in problem.rule
        assert f"put {ARCHIVE} into {root}" in problem.remedy
        assert names(root) == {LOCK}

    def test_makes_the_folder_that_it_goes_to(self, tmp_path, server, monkeypatch):
        root, _ = self.shown(tmp_path, server)
        reader = small(root).reader()
        monkeypatch.setattr(Cifar10, "reader", lambda self: reader)
        data = Cifar10(seed=0, download=True)
        data.prepare()
        assert names(tmp_path / "xdg" / "ptdbench" / "cifar-10") == {ARCHIVE, FOLDER, LOCK}
        assert len(data.held_out) == 20

    def test_into_a_file_is_refused(self, tmp_path, root, monkeypatch):
        (tmp_path / "file").touch()
        reader = small(root).reader()
        monkeypatch.setattr(Cifar10, "reader", lambda self: reader)
        assert refused_at_prepare(Cifar10(seed=0, root=str(tmp_path / "file"), download=True)).option == "root"


def test_the_small_archive_is_the_same_each_time(tmp_path):
    contents = [small_cifar10.write(tmp_path / name).read_bytes() for name in ("a", "b")]
    assert contents[0] == contents[1]
    assert np.frombuffer(contents[0][:2], np.uint8).tolist() == [0x1F, 0x8B]
