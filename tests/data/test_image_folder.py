import os
import shutil

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from ptdbench.data import image_folder
from ptdbench.data.image_folder import ImageFolder
from ptdbench.data.protocol import shuffled
from tests.data.made import image_files
from tests.refusals import Abridged, refusal_of


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    return image_files(tmp_path_factory.mktemp("collection"))


@pytest.fixture
def root(collection, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(collection, tmp_path / "images")


def images(root, **options):
    return ImageFolder(**{"root": root and str(root), "classes": 3, "image_size": 32, "seed": 5} | options)


def transformed(paths, *transforms):
    normalize = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    transform = v2.Compose([*transforms, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalize])
    return torch.stack([torch.as_tensor(transform(Image.open(path))) for path in paths])


class TestSamples:
    def test_global_generator_is_unused(self, collection, monkeypatch):
        """Its dropout draws from them, and another thread may set them meanwhile."""
        before, expected = torch.get_rng_state(), images(collection).samples(0, 6)[0]
        assert torch.equal(torch.get_rng_state(), before)
        read = image_folder.read
        monkeypatch.setattr(image_folder, "read", lambda *given: torch.manual_seed(0) and read(*given))
        assert torch.equal(images(collection).samples(0, 6)[0], expected)

    def test_equal_torchvisions_transforms(self, collection):
        data, paths = images(collection), sorted((collection / "train").glob("*/*.png"))
        wanted, order = [], shuffled(len(data._training), data.seed, 30, 42).tolist()  # of two epochs
        for index, chance in zip(order, image_folder.draws(5, 30, 42).tolist(), strict=True):
            torch.manual_seed(chance)
            wanted.append(transformed([paths[index]], v2.RandomResizedCrop(32), v2.RandomHorizontalFlip()))
        batch, labels = data.samples(30, 42)
        torch.testing.assert_close(batch, torch.cat(wanted), rtol=0, atol=1e-5)
        assert torch.equal(labels, torch.tensor([index // 6 for index in order]))

    @pytest.mark.parametrize("size", [(60, 40), (400, 10), (10, 400), (1, 1)])
    def test_crops_equal_torchvisions(self, size):
        image = Image.new("RGB", size)
        for chance in range(50):
            torch.manual_seed(chance)
            wanted = v2.RandomResizedCrop(32).make_params([image])
            crop = image_folder._crop(*size, torch.Generator().manual_seed(chance))
            assert dict(zip(("top", "left", "height", "width"), crop, strict=True)) == wanted

    def test_come_from_files_of_any_kind_and_depth(self, root):
        folder = root / "train" / "cat" / "more" / "and more"
        folder.mkdir(parents=True)
        Image.new("L", (50, 50), 128).save(folder / "grey.JPG")
        Image.new("RGBA", (50, 50), (1, 2, 3, 4)).save(folder / "see-through.png")
        Image.new("P", (50, 50)).save(folder / "pälette.bmp")
        (folder / "notes.txt").write_text("no image")
        _, labels = images(root).samples(0, 21)
        assert torch.bincount(labels).tolist() == [9, 6, 6]

    @pytest.mark.parametrize("content", [b"", b"no image", "truncated", None])
    def test_undecodable_image_is_named(self, root, content):
        file = root / "train" / "dog" / "3.png"
        data = images(root)
        data.prepare()
        if content == "truncated":
            os.truncate(file, file.stat().st_size // 2)
        elif content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot read .*train/dog/3\.png as an image: .*\w+"):
            data.samples(0, 18)


class TestHeldOut:
    def test_held_out_images_are_center_crops_of_a_folder_that_is_optional(self, collection, root):
        held_out = images(collection).held_out
        batch, labels = held_out.samples(0, len(held_out))
        assert labels.tolist() == [0, 0, 1, 1, 2, 2]
        paths = sorted((collection / "val").glob("*/*.png"))
        wanted = transformed(paths, v2.Resize(36), v2.CenterCrop(32))  # 32 * 256 / 224 is 36.6
        torch.testing.assert_close(batch, wanted, rtol=0, atol=1e-5)
        (root / "val").rename(root / "test")
        assert len(images(root, val="test").held_out) == 6
        data = images(root)
        data.prepare()
        assert data.held_out is None


def empty(folder):
    for file in folder.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()


@pytest.mark.parametrize(("spoil", "options", "message"), [
    (None, {"workers": "many"}, "workers=many: must be a whole number of at least 0"),
    (None, {"workers": 1.5}, "workers=1.5: …"),
    (None, {"root": None}, "root=null: must name the folder of the images; try data.root=FOLDER with train/…"),
    (lambda root: shutil.rmtree(root / "train"), {},
     "root=…: has no folder train; try data.root=FOLDER with train/CLASS/IMAGE.jpg in it"),
    (lambda root: empty(root / "train"), {}, "root=…: …/train: Couldn't find any class folder …"),
    *((lambda root, part=part: empty(root / part / "dog"), {},
       f"root=…: …/{part}: Found no valid file for the classes dog…") for part in ("train", "val")),
    *((None, {"classes": classes}, f"classes={classes}: …/train has 3 folders, …; try model.classes=3")
      for classes in (2, 1000)),
    (lambda root: (root / "val" / "dog").rename(root / "val" / "cod"), {},
     "root=…: train and val must have the same folders, … cod; …"),
    (lambda root: shutil.rmtree(root / "val" / "dog"), {}, "root=…: … dog; …"),
])  # fmt: skip
def test_options_and_folders_refused(root, spoil, options, message):
    if spoil:
        spoil(root)
    refusal = refusal_of(lambda: images(**{"root": root} | options).prepare())
    assert refusal == Abridged(message)


class TestWorkers:
    @pytest.mark.parametrize(
        ("cores", "threads", "expected"),
        [(2, 2, 1), (1, 1, 1), (4, 4, 3), (64, 64, 8), (64, 6, 5), (6, 64, 5), (9, 9, 8)],
    )
    def test_are_the_cores_that_a_rank_has_to_spare(self, collection, monkeypatch, cores, threads, expected):
        data = images(collection)
        # Only later is a rank bound to its share.
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        assert data.workers == expected

    @pytest.mark.parametrize("workers", [0, 1, 20])
    def test_are_as_many_as_are_asked_for(self, collection, workers):
        assert images(collection, workers=workers).workers == workers
        assert len(images(collection, workers=workers).held_out.samples(0, 6)[1]) == 6


class TestIdentity:
    def test_is_that_of_the_files_wherever_they_lie(self, collection, root):
        assert images(collection).identity == images(root, seed=9, image_size=64).identity

    def test_changes_with_name_size_or_file(self, root):
        seen = {images(root).identity}
        for change in (
            lambda: (root / "train" / "cat" / "0.png").rename(root / "train" / "cat" / "zero.png"),
            lambda: (root / "train" / "dog" / "1.png").open("ab").write(b"x"),
            (root / "val" / "eel" / "0.png").unlink,
            lambda: shutil.rmtree(root / "val"),
        ):
            change()
            seen.add(images(root).identity)
        assert len(seen) == 5
