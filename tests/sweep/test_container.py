"""Containers: srun's flags and the ranks' command for each kind, what is mounted, and what is refused."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ptdbench.setup.config import Config, Container
from ptdbench.sweep import container
from ptdbench.sweep.resources import Shape, Step
from tests.conftest import ROOT, read

STEP = Step(["/venv/bin/python", "-u", "-m", "tool"], ["--unbuffered"])
ON_GPUS, ON_CPUS, ONE_RANK = Shape(2, 4, 4, None), Shape(2, 4, 0, None), Shape(1, 1, 0, None)

#: srun of a cluster without plugins, which has OCI containers.
PLAIN = {"--help": "      --container             Path to OCI container bundle\n", "--version": "slurm-wlm 24.11.5\n"}
PYXIS = {"--help": PLAIN["--help"] + "      --container-image=[USER@]IMAGE[:TAG]|PATH\n"}


@cache
def defaults() -> Container:
    return read("cluster=slurm").cluster.container  # type: ignore[attr-defined]


def asked(**options: Any) -> Container:
    """``conf/cluster/slurm.yaml`` with an image, and some options changed."""
    return replace(defaults(), **{"image": "/images/a.sqsh"} | options)


def entered(options: Container, shape: Shape = ON_CPUS, used: tuple[str, ...] = ("/work",), **more: Any) -> Step:
    return container.enter(STEP, options, shape, [Path(path) for path in used], **more)


def inside(image: str) -> list[str]:
    """The ranks' command in the image: the interpreter is its own, ptdbench is that of the submitting machine."""
    path = ":".join(dict.fromkeys([str(ROOT), str(Path.cwd())]))
    return ["env", f"PTDBENCH_CONTAINER={image}", f"PYTHONPATH={path}", "python3", "-u", "-m", "tool"]


class TestEnter:
    def test_pyxis_takes_flags_of_srun(self):
        step = entered(asked(mounts=["/data:/mnt/data:ro"], workdir="/mnt", args=["--no-container-mount-home"]))
        assert step.command == inside("/images/a.sqsh")
        assert step.flags == [
            "--unbuffered", "--container-image=/images/a.sqsh",
            "--container-mounts=/work:/work,/data:/mnt/data:ro", "--container-workdir=/mnt",
            "--no-container-mount-home",
        ]  # fmt: skip

    @pytest.mark.parametrize(("shape", "gpus"), [(ON_GPUS, ["--nv"]), (ON_CPUS, [])])
    def test_apptainer_runs_the_command(self, shape, gpus):
        step = entered(asked(kind="apptainer", image="a.sif", workdir="/mnt", args=["--cleanenv"]), shape)
        outer = ["apptainer", "exec", *gpus, "--bind=/work:/work", "--pwd=/mnt", "--cleanenv", "a.sif"]
        assert step == Step([*outer, *inside("a.sif")], ["--unbuffered"])

    def test_oci_takes_a_bundle(self):
        step = entered(asked(kind="oci", image="/bundle"), bundle=Path("/sweep/containers/x"))
        assert step == Step(inside("/bundle"), ["--unbuffered", "--container=/sweep/containers/x"])

    def test_without_an_image_nothing_changes(self):
        assert entered(asked(image=None)) is STEP

    def test_an_installed_ptdbench_is_mounted_without_its_neighbours(self, monkeypatch, tmp_path):
        """The other packages of the machine are not those of the image."""
        package = tmp_path / "site-packages" / "ptdbench"
        monkeypatch.setattr(container, "PACKAGE", package)
        step = entered(asked())
        assert f"{package}:/opt/ptdbench/ptdbench" in step.flags[2]
        assert step.command[2] == f"PYTHONPATH=/opt/ptdbench:{Path.cwd()}"


class TestFolders:
    @pytest.fixture
    def read(self, monkeypatch, tmp_path):
        """A run's configuration in an empty folder, with a cache of its own."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / f"{tmp_path.name}-cache"))

        def it(*overrides: str) -> Config:
            return read("cluster=slurm", "cluster.container.image=/i.sqsh", *overrides)

        return it

    def test_what_runs_use(self, read, tmp_path):
        of_user = tmp_path.parent / f"{tmp_path.name}-cache" / "ptdbench"
        found = container.folders(read("cluster.log=/elsewhere/logs/%j"), Path("/sweeps/today"))
        assert set(found) == {ROOT, tmp_path, of_user, Path("/sweeps/today"), Path("/elsewhere/logs")}
        assert of_user.is_dir()  # what is mounted must exist

    def test_what_lies_in_another_is_mounted_with_it(self, read, tmp_path):
        assert tmp_path / "outputs" / "x" not in container.folders(read(), tmp_path / "outputs" / "x")

    def test_of_a_log_what_does_not_depend_on_the_job(self, read):
        logs = read("cluster.log=/elsewhere/%j/logs")
        assert Path("/elsewhere") in container.folders(logs, Path("/sweeps/today"))
        assert Path("/elsewhere") not in container.folders(logs, None), "a script by itself has its output here"

    def test_data_of_the_users_own(self, read, tmp_path):
        books = tmp_path.parent / f"{tmp_path.name}-books"
        books.mkdir()
        found = container.folders(read("data=text", f"data.path={books}", "data.tokenizer=/no/such/file"), None)
        assert books in found
        assert not {Path("/no/such/file"), Path("/")} & {*found}

    @pytest.mark.parametrize("path", ["link/to/be/made", "./link"])
    def test_data_behind_a_link_or_still_to_be_made(self, read, tmp_path, path):
        books = tmp_path.parent / f"{tmp_path.name}-books"
        books.mkdir()
        (tmp_path / "link").symlink_to(books)
        assert books in container.folders(read("data=cifar10", f"data.root={path}"), None)

    def test_outside_of_containers_nothing(self, read):
        assert container.folders(read("cluster.container.image=null"), Path("/sweeps/today")) == []


class TestBundle:
    SPECIFICATION = {  # noqa: RUF012
        "root": {"path": "rootfs", "readonly": True},
        "process": {"args": ["sh"], "cwd": "/", "env": ["A=1"]},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
    }

    @pytest.fixture
    def image(self, tmp_path):
        (tmp_path / "image").mkdir()
        (tmp_path / "image" / "config.json").write_text(json.dumps(self.SPECIFICATION))
        return tmp_path / "image"

    def test_has_our_mounts_after_its_own(self, image, tmp_path):
        options = asked(kind="oci", image=str(image), mounts=["/data:/mnt:ro"], workdir="/mnt")
        bundle = container.write_bundle(options, [Path("/work")], tmp_path / "sweep" / "x")
        written = json.loads((bundle / "config.json").read_text())
        bind = {"type": "none", "options": ["rbind", "rw"]}
        assert written["mounts"] == [
            *self.SPECIFICATION["mounts"],
            {"source": "/work", "destination": "/work", **bind},
            {"source": "/data", "destination": "/mnt", "type": "none", "options": ["rbind", "ro"]},
        ]
        assert written["process"] == {**self.SPECIFICATION["process"], "cwd": "/mnt"}
        assert written["root"] == {"path": str(image / "rootfs"), "readonly": True}
        assert (bundle / "rootfs").readlink() == image / "rootfs"

    def test_no_other_kind_has_one(self, tmp_path):
        assert container.write_bundle(asked(), [], tmp_path / "x") is None
        assert not (tmp_path / "x").exists()

    def refused(self, image: Path, shape: Shape = ONE_RANK, **says: str) -> list[str]:
        options = asked(kind="oci", image=str(image))
        return [str(problem) for problem in container.check(options, shape, {**PLAIN, **says}.__getitem__)]

    def test_is_read_before_anything_is_submitted(self, image, tmp_path):
        assert self.refused(image) == []
        (none,) = self.refused(tmp_path / "none")
        assert none.endswith("its config.json cannot be read (No such file or directory)")
        (image / "config.json").write_text("{}")
        (rootless,) = self.refused(image)
        assert rootless.endswith("(it names no root)")

    def test_old_versions_of_slurm_start_one_task(self, image):
        (told,) = self.refused(image, ON_CPUS, **{"--version": "slurm 22.05.8"})
        assert "starts one task a node" in told
        assert self.refused(image, ON_CPUS, **{"--version": "slurm 24.11.5"}) == []


class TestRefused:
    def told(self, srun: dict[str, str], **options: Any) -> list[str]:
        return [str(problem) for problem in container.check(asked(**options), ON_CPUS, srun.__getitem__)]

    def test_pyxis_that_is_not_there(self):
        rule = "cluster.container.kind=pyxis: is a plugin of SLURM, which srun does not have here; try apptainer, oci"
        assert self.told(PLAIN) == [rule]
        assert self.told(PYXIS) == []

    @pytest.mark.parametrize("mount", ["data", "/data:mnt", "data:/mnt:ro"])
    def test_mounts_that_are_no_paths(self, mount):
        rule = "must be a path, or HOST:CONTAINER[:ro]; give absolute paths"
        assert self.told(PYXIS, mounts=[mount]) == [f"cluster.container.mounts={mount}: {rule}"]

    def test_nothing_is_asked_without_an_image(self):
        assert self.told({}, image=None, mounts=["data"]) == []
