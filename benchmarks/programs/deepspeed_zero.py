"""Linear layers trained by DeepSpeed on made data in fp16: ``deepspeed_zero.py 2``, or ``3``, for its stage of ZeRO."""

import sys

import deepspeed
import torch
from torch import nn

WIDTH, LAYERS = 2048, 8


def main(stage: int) -> None:
    """Take four steps, and print the bytes of the optimizer's state."""
    deepspeed.init_distributed()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "fp16": {"enabled": True, "initial_scale_power": 16},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
    }
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(4):
        engine.backward(engine(torch.randn(8, WIDTH, dtype=torch.half, device=engine.device)).float().mean())
        engine.step()
    states = engine.optimizer.optimizer.state.values()
    size = sum(
        value.numel() * value.element_size() for state in states for value in state.values() if value.numel() > 1
    )
    print(f"skipped {engine.skipped_steps} steps, optimizer state {size:,} bytes")


if __name__ == "__main__":
    main(int(sys.argv[sys.argv.index("--stage") + 1]) if "--stage" in sys.argv else int(sys.argv[-1]))
