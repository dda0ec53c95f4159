"""Benchmark how a PyTorch model is parallelized: ``python train.py --help``."""

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ptdbench import entry


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def train(config: DictConfig) -> float | None:
    """One run; Hydra calls it once for each job of a sweep, and tells a sweeper that searches what it returns."""
    return entry.one_run(config, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    entry.main(train, Path(__file__).parent / "conf")
