"""Whether data hold training up: what each pipeline delivers alone, and how fast the step loop asks.

    python benchmarks/data_speed.py
    python benchmarks/data_speed.py --only text digits

For each pipeline a short training run says how many samples a second its step loop takes, over all ranks, and which
share of a step it waits for them. Then as many processes as there were ranks make samples of the same run at once, each
with one thread and the worker processes that its data ask for, and nothing else. The tokens of text are held against a
requirement: 50 million a second from a warm file on two cores, at 1,024 tokens a sample.

Images are made up: an archive in CIFAR-10's own format, and a folder of JPEG files of 500 x 400 pixels.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.script import judged, parser_of, read, trained
from ptdbench.data.feed import Feed
from ptdbench.launch.world import World
from ptdbench.setup import run_spec

#: Tokens a second that text must come at.
TOKENS = 50e6

#: For each pipeline what is said on the command line of a short run.
RUN = ("eval.every=null", "checkpoint.every_steps=null", "train.max_minutes=2", "train.warmup_steps=2")
PIPELINES: dict[str, tuple[str, ...]] = {
    "text": ("model=gpt_tiny", "model.sequence_length=1024", "train.steps=12"),
    "digits": ("experiment=digits_resnet18", "train.steps=12"),
    "cifar10": (
        "experiment=cifar10_resnet18", "data.root={folder}/cifar10", "train.global_batch=64", "train.steps=6",
        "data._target_=tests.data.small_cifar10.SmallCifar10",
    ),
    "image_folder": (
        "experiment=imagefolder_resnet50", "data.root={folder}/images", "model.classes=2", "precision=fp32",
        "train.global_batch=8", "train.steps=6",
    ),
}  # fmt: skip


def main() -> int:
    """Print the figures; 1 if they miss the requirement."""
    options = _parse()
    passed = True
    print(f"{'pipeline':14} {'delivers/s':>12} {'step loop takes/s':>18} {'ratio':>8} {'data wait':>10}")
    with TemporaryDirectory() as folder:
        for name in options.only:
            MAKERS.get(name, lambda _: None)(Path(folder))
            overrides = [*RUN, *(word.format(folder=folder) for word in PIPELINES[name])]
            record = trained(Path(folder) / name, *overrides, capture_output=True)
            made = sum(_delivered(overrides, record["world_size"], options.seconds))
            taken, wait = record["metrics"]["samples_per_second"], record["metrics"]["data_wait_share"]
            print(f"{name:14} {made:12,.0f} {taken:18,.1f} {made / taken:8,.1f} {100 * wait:9.2f}%", flush=True)
            if name == "text":
                tokens = made * record["tokens_per_sample"]
    if "text" in options.only:
        told = f"text: {tokens / 1e6:,.0f} million tokens a second"
        passed = judged(told, f"at least {TOKENS / 1e6:.0f}", tokens >= TOKENS)
    return int(not passed)


def _delivered(overrides: Sequence[str], ranks: int, seconds: float) -> list[float]:
    """Samples a second that each of several processes makes while the others do so too."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(ranks), context.SimpleQueue()
    makers = [
        context.Process(target=_make, args=(list(overrides), rank, ranks, seconds, ready, results))
        for rank in range(ranks)
    ]
    for maker in makers:
        maker.start()
    found = [results.get() for _ in makers]
    for maker in makers:
        maker.join()
    return found


def _make(overrides: list[str], rank: int, ranks: int, seconds: float, ready, results) -> None:  # type: ignore[no-untyped-def]
    torch.set_num_threads(1)
    training = run_spec.specify(read(*overrides), World(rank, ranks, rank, ranks, "benchmark")).training
    assert training
    rows = partial(training.layout.rows, replica=rank)
    feed = Feed(training.data, rows, torch.device("cpu"))
    for step in range(3):  # reads the files, and starts the workers
        feed(step)
    ready.wait()
    begun, step = time.perf_counter(), 3
    while (elapsed := time.perf_counter() - begun) < seconds:
        feed(step)
        step += 1
    feed.close()
    results.put((step - 3) * training.layout.replica_batch / elapsed)


def _make_cifar10(folder: Path) -> None:
    from tests.data import small_cifar10

    (folder / "cifar10").mkdir()
    small_cifar10.write(folder / "cifar10")


def _make_images(folder: Path) -> None:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for part, kind in ((part, kind) for part in ("train", "val") for kind in ("cats", "dogs")):
        (folder / "images" / part / kind).mkdir(parents=True)
        for number in range(32):
            coarse = torch.randint(0, 256, (10, 13, 3), dtype=torch.uint8, generator=generator).numpy()
            image = Image.fromarray(coarse).resize((500, 400), Image.Resampling.BICUBIC)
            image.save(folder / "images" / part / kind / f"{number}.jpg", quality=90)


MAKERS: dict[str, Callable[[Path], None]] = {"cifar10": _make_cifar10, "image_folder": _make_images}


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=PIPELINES, default=list(PIPELINES), help="these pipelines")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long samples are made")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
