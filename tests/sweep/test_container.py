"""Containers: srun's flags and the ranks' command for each kind, what is mounted, and what is refused."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ptdbench.setup.config import Config, Container
from ptdbench.setup.runs import Shape
from ptdbench.sweep import resources
from ptdbench.sweep.resources import Step, mounted_folders
from tests.conftest import ROOT, read

STEP = Step(["/venv/bin/python", "-u", "-m", "tool"], ["--unbuffered"])
ON_GPUS, ON_CPUS = Shape(2, 4, 4, None), Shape(2, 4, 0, None)

#: What srun prints on a cluster without plugins, and with Pyxis.
PLAIN = "      --container             Path to OCI container bundle\n"
PYXIS = f"{PLAIN}      --container-image=[USER@]IMAGE[:TAG]|PATH\n"


@cache
def defaults() -> Container:
    return read("cluster=slurm").cluster.container  # type: ignore[attr-defined]


def container(**options: Any) -> Container:
    """``conf/cluster/slurm.yaml`` with an image, and some options changed."""
    return replace(defaults(), **{"image": "/images/a.sqsh"} | options)


def entered(options: Container, shape: Shape = ON_CPUS, used: tuple[str, ...] = ("/work",)) -> Step:
    return resources.in_container(STEP, options, shape, [Path(path) for path in used])


def inside(image: str) -> list[str]:
    """The ranks' command in the image: the interpreter is its own, ptdbench is that of the submitting machine."""
    variables = [f"PTDBENCH_CONTAINER={image}", f"PYTHONPATH={ROOT}", f"PTDBENCH_FOLDER={Path.cwd()}"]
    return ["env", *variables, "python3", "-u", "-m", "tool"]


class TestEnter:
    def test_pyxis_takes_flags_of_srun(self):
        step = entered(container(mounts=["/data:/mnt/data:ro"], workdir="/mnt", args=["--no-container-mount-home"]))
        assert step.command == inside("/images/a.sqsh")
        assert step.flags == [
            "--unbuffered", "--container-image=/images/a.sqsh",
            "--container-mounts=/work:/work,/data:/mnt/data:ro", "--container-workdir=/mnt",
            "--no-container-mount-home",
        ]  # fmt: skip

    @pytest.mark.parametrize(("shape", "gpus"), [(ON_GPUS, ["--nv"]), (ON_CPUS, [])])
    def test_apptainer_runs_the_command(self, shape, gpus):
        step = entered(container(kind="apptainer", image="a.sif", workdir="/mnt", args=["--cleanenv"]), shape)
        outer = ["apptainer", "exec", *gpus, "--bind=/work:/work", "--pwd=/mnt", "--cleanenv", "a.sif"]
        assert step == Step([*outer, *inside("a.sif")], ["--unbuffered"])

    def test_without_an_image_nothing_changes_and_an_installed_ptdbench_is_mounted_alone(self, monkeypatch, tmp_path):
        assert entered(container(image=None)) is STEP
        # The other packages of the machine are not those of the image.
        package = tmp_path / "site-packages" / "ptdbench"
        monkeypatch.setattr(resources, "PACKAGE", package)
        step = entered(container())
        assert f"{package}:/opt/ptdbench/ptdbench" in step.flags[2]
        assert step.command[2] == "PYTHONPATH=/opt/ptdbench"


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
        mounted = mounted_folders(read(), Path("/sweeps/today"))
        assert set(mounted) == {ROOT, tmp_path, of_user, Path("/sweeps/today")}
        assert of_user.is_dir()  # what is mounted must exist
        assert tmp_path / "outputs" / "x" not in mounted_folders(read(), tmp_path / "outputs" / "x")  # with tmp_path
        assert mounted_folders(read("cluster.container.image=null"), Path("/sweeps/today")) == []

    def test_data_also_behind_a_link_or_still_to_be_made(self, read, tmp_path):
        books = tmp_path.parent / f"{tmp_path.name}-books"
        books.mkdir()
        mounted = mounted_folders(read("data=text", f"data.path={books}", "data.tokenizer=/no/such/file"), None)
        assert books in mounted
        assert not {Path("/no/such/file"), Path("/")} & {*mounted}
        (tmp_path / "link").symlink_to(books)
        for path in ("link/to/be/made", "./link"):
            assert books in mounted_folders(read("data=cifar10", f"data.root={path}"), None)


class TestRefused:
    def problems(self, srun: str, **options: Any) -> list[str]:
        return [str(problem) for problem in resources.check_container(container(**options), lambda: srun)]

    def test_pyxis_that_is_not_there(self):
        rule = "cluster.container.kind=pyxis: is a plugin of SLURM, which srun does not have here; try apptainer"
        assert self.problems(PLAIN) == [rule]
        assert self.problems(PYXIS) == []

        assert self.problems("", image=None, mounts=["data"]) == []  # nothing is asked without an image

    @pytest.mark.parametrize("mount", ["data", "/data:mnt", "data:/mnt:ro"])
    def test_mounts_that_are_no_paths(self, mount):
        rule = "must be a path, or HOST:CONTAINER[:ro]; give absolute paths"
        assert self.problems(PYXIS, mounts=[mount]) == [f"cluster.container.mounts={mount}: {rule}"]
