import http.server
import os
import pickle
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torchvision.datasets import utils

from ptdbench.data.cifar10 import Cifar10
from ptdbench.problems import ConfigError
from tests.data import small_cifar10
from tests.data.made import at_once, problem_of
from tests.data.small_cifar10 import ARCHIVE, FOLDER, SmallCifar10

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
LOCK = f"{FOLDER}.lock"


pytestmark = pytest.mark.usefixtures("cache")


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


def pixels(images):
    values = (images * STD + MEAN) * 255
    assert torch.allclose(values, values.round(), atol=1e-3)
    return values.round().to(torch.uint8)


def names(folder):
    return {path.name for path in Path(folder).iterdir()} - {"small-cifar-10.json"}


class TestSamples:
    def test_samples_and_held_out_images_are_those_of_the_archive(self, root):
        images, labels = prepared(root, padding=0, flip=False).samples(0, 200)
        assert (images.shape, images.dtype, labels.dtype) == ((200, 3, 32, 32), torch.float32, torch.int64)
        red, green, blue = pixels(images).unbind(1)
        assert torch.equal(red, (10 * labels).to(torch.uint8).view(-1, 1, 1).expand(-1, 32, 32))
        assert sorted(blue[:, 0, 0].tolist()) == sorted([*range(40)] * 5)
        assert len(green.flatten(1).unique(dim=0)) == 200
        # The format has red row by row, then green, then blue.
        stored = pickle.loads(small_cifar10.batches(40, 20)["test_batch"])["data"]
        held_out = prepared(root).held_out
        images, labels = held_out.samples(0, 20)
        assert len(held_out) == 20
        assert labels.tolist() == [n % 10 for n in range(20)]
        assert (pixels(images).numpy() == stored.reshape(20, 3, 32, 32)).all()


@pytest.mark.parametrize("root", [None, "nowhere/at/all", __file__])
def test_without_a_folder_it_says_what_to_do(root):
    problem = problem_of(Cifar10, seed=0, root=root)
    assert (problem.option, problem.value) == ("root", root)
    assert "data.root=FOLDER" in problem.remedy
    assert "data.download=true" in problem.remedy


class TestPreparing:
    def test_writes_nothing_where_all_is_there(self, root):
        prepared(root)
        (root / LOCK).unlink()
        (root / ARCHIVE).unlink()
        before = [path.stat().st_mtime_ns for path in (root, root / FOLDER)]
        prepared(root)
        prepared(root, download=True)
        assert names(root) == {FOLDER}
        assert [path.stat().st_mtime_ns for path in (root, root / FOLDER)] == before

    def test_replaces_only_damaged_or_missing_files(self, root):
        prepared(root, download=True)  # nobody listens at the archive's address
        (root / FOLDER / "notes.txt").write_text("mine")
        files = {*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"}
        for name in ("data_batch_3", "test_batch", "batches.meta"):
            for spoil in (lambda path: path.write_bytes(b"broken"), Path.unlink):
                spoil(root / FOLDER / name)
                prepared(root).samples(0, 1)
        assert (root / FOLDER / "notes.txt").read_text() == "mine"
        assert names(root / FOLDER) == files | {"notes.txt"}
        assert names(root) == {ARCHIVE, FOLDER, LOCK}

    @pytest.mark.parametrize("spoil", [Path.unlink, lambda archive: os.truncate(archive, 1000)])
    @pytest.mark.parametrize("folder", ["none", "incomplete"])
    def test_incomplete_archive_is_refused(self, root, folder, spoil):
        if folder == "incomplete":
            prepared(root)
            (root / FOLDER / "data_batch_1").unlink()
        spoil(root / ARCHIVE)
        before = names(root)
        problem = problem_of(small(root).prepare)
        assert (problem.option, problem.value) == ("root", root)
        assert f"neither {FOLDER} nor {ARCHIVE}, complete" in problem.rule
        assert "data.download=true" in problem.remedy
        assert names(root) == before

    def test_os_errors_name_the_root(self, root):
        (root / LOCK).mkdir()  # a mode of 555 would not stop root, whom CI often runs as
        problem = problem_of(small(root).prepare)
        assert problem.option == "root"
        assert "Is a directory" in problem.rule
        assert "download" not in str(problem)


def test_one_of_two_processes_unpacks(root, tmp_path):
    def unpack(note):
        extract = utils.extract_archive
        utils.extract_archive = lambda *arguments, **options: (note(), extract(*arguments, **options))
        prepared(root)

    assert at_once(2, unpack, tmp_path / "log") == 1
    small(root).samples(0, 1)


class TestReading:
    def test_changed_pickle_is_not_opened(self, root, tmp_path):
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
            with pytest.raises(ConfigError, match="has missing or changed files"):
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
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "web"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


class TestDownload:
    def shown(self, tmp_path, server):
        url, folder = server
        archive = small_cifar10.write(tmp_path / "new", url=f"{url}/{ARCHIVE}")
        shutil.move(archive, folder / ARCHIVE)
        return tmp_path / "new", folder / ARCHIVE

    def test_download_on_request_only(self, tmp_path, server):
        root, shown = self.shown(tmp_path, server)
        problem_of(small(root).prepare)
        assert names(root) == set()
        prepared(root, download=True).samples(0, 1)
        assert names(root) == {ARCHIVE, FOLDER, LOCK}
        shutil.rmtree(root / FOLDER)
        (root / ARCHIVE).write_bytes(shown.read_bytes()[:1000])  # one that is truncated is replaced
        prepared(root, download=True).samples(0, 1)

    def test_failed_download_says_why(self, tmp_path, server):
        root, shown = self.shown(tmp_path, server)
        shown.write_bytes(shown.read_bytes()[:-1])
        assert "corrupted" in problem_of(small(root, download=True).prepare).rule
        assert FOLDER not in names(root)
        shown.unlink()
        problem = problem_of(small(root, download=True).prepare)
        assert (problem.option, problem.value) == ("root", root)
        assert f"cannot download or unpack {ARCHIVE}: HTTP Error 404" in problem.rule
        assert "put a complete archive there" in problem.remedy

    def test_default_root_is_the_users_cache(self, cache, tmp_path, server, monkeypatch):
        root, _ = self.shown(tmp_path, server)
        reader = small(root).reader()
        monkeypatch.setattr(Cifar10, "reader", lambda self: reader)
        data = Cifar10(seed=0, download=True)
        assert not cache.exists(), "a constructor is light"
        data.prepare()
        assert names(cache / "cifar-10") == {ARCHIVE, FOLDER, LOCK}
        assert len(data.held_out) == 20
