"""A CIFAR-10 of a few images in the real one's files, and the data set that takes it for the real one."""

import gzip
import hashlib
import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from ptdbench.data.cifar10 import Cifar10

ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CHECKSUMS = "small-cifar-10.json"


class SmallCifar10(Cifar10):
    """Reads what :func:`write` has written into its root."""

    def reader(self) -> Any:
        """torchvision's reader with the checksums of the small archive; :func:`write` has left them in the root."""
        md5 = json.loads((self.root / _CHECKSUMS).read_text())
        real = super().reader()

        class Reader(real):  # type: ignore[misc, valid-type] # known when it runs
            url = md5["url"]
            tgz_md5 = md5[ARCHIVE]
            train_list = tuple((name, md5[name]) for name, _ in real.train_list)
            test_list = tuple((name, md5[name]) for name, _ in real.test_list)
            meta = real.meta | {"md5": md5[real.meta["filename"]]}

        return Reader


def write(root: Path, *, training: int = 40, test: int = 20, url: str = "http://127.0.0.1:9/nothing") -> Path:
    """Put a small archive into a folder, with the checksums that :class:`SmallCifar10` asks for beside it.

    Args:
        root: The folder; it is made if need be.
        training: Images in each of the five training batches.
        test: Images in the test batch.
        url: Where :class:`SmallCifar10` would download the archive from.

    Returns:
        The archive.
    """
    root.mkdir(parents=True, exist_ok=True)
    files = batches(training, test)
    content = _packed(files)
    md5 = {name: hashlib.md5(file).hexdigest() for name, file in {**files, ARCHIVE: content}.items()}
    (root / _CHECKSUMS).write_text(json.dumps(md5 | {"url": url}))
    archive = root / ARCHIVE
    archive.write_bytes(content)
    return archive


def batches(training: int, test: int) -> dict[str, bytes]:
    """The files of the folder, as https://www.cs.toronto.edu/~kriz/cifar.html describes them.

    Image ``n`` of a file shows class ``n % 10``; its red is ``10 * class``, its green is noise and its blue is ``n``.
    """
    rng = np.random.default_rng(0)
    files = {f"data_batch_{number}": _batch(training, rng) for number in range(1, 6)}
    files["test_batch"] = _batch(test, rng)
    files["batches.meta"] = pickle.dumps({"label_names": list(NAMES), "num_vis": 3072}, protocol=2)
    return files


def _batch(count: int, rng: np.random.Generator) -> bytes:
    labels = [n % 10 for n in range(count)]
    planes = np.empty((count, 3, 32 * 32), np.uint8)
    planes[:, 0] = 10 * np.array(labels, np.uint8)[:, None]
    planes[:, 1] = rng.integers(0, 256, (count, 32 * 32))
    planes[:, 2] = np.arange(count, dtype=np.uint8)[:, None]
    return pickle.dumps({"data": planes.reshape(count, 3072), "labels": labels}, protocol=2)


def _packed(files: dict[str, bytes]) -> bytes:
    """The same bytes each time: neither the archive nor its members say when they were made."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()
