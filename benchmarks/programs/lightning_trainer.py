"""A transformer trained by Lightning on made data: ``lightning_trainer.py fsdp``, or ``model_parallel``."""

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

WIDTH, LENGTH, LAYERS = 1024, 256, 4


class Model(lightning.LightningModule):
    """Layers of torch's transformer, and a regression of their outputs."""

    def __init__(self, is_sharded: bool) -> None:
        super().__init__()
        self._is_sharded = is_sharded
        layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def configure_model(self) -> None:
        """Shard the layers, which the strategy FSDP does by itself."""
        if self._is_sharded:
            for layer in self.layers.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        """Return the loss of a batch."""
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main(name: str) -> None:
    """Take four steps."""
    is_parallel = name == "model_parallel"
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    strategy: Any = sharded if is_parallel else FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer})
    trainer = lightning.Trainer(
        accelerator="cuda", devices=2, strategy=strategy, max_steps=4, precision="bf16-true", logger=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    samples = torch.randn(64, LENGTH, WIDTH, dtype=torch.bfloat16)
    trainer.fit(Model(is_parallel), DataLoader(TensorDataset(samples), batch_size=4))


if __name__ == "__main__":
    main(sys.argv[1])
