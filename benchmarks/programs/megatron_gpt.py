"""A GPT of Megatron-Core, its layers in pure torch, trained on made tokens with tensor parallelism of two."""

import os
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

WIDTH, LAYERS, HEADS, LENGTH, VOCABULARY, BATCH = 1024, 4, 16, 512, 32000, 4


def main() -> None:
    """Take four steps."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    shape = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=2, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, attention_softmax_in_fp32=True,
    )  # fmt: skip
    gpt = GPTModel(shape, get_gpt_layer_local_spec(), VOCABULARY, LENGTH).bfloat16().cuda()
    model = DistributedDataParallel(shape, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, use_distributed_optimizer=True, clip_grad=1.0), [model]
    )
    shape.finalize_model_grads_func = finalize_model_grads
    mask = torch.tril(torch.ones(1, 1, LENGTH, LENGTH, device="cuda")) < 0.5
    positions = torch.arange(LENGTH, device="cuda").expand(BATCH, LENGTH)

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return output.float().mean(), {"loss": output.float().mean().detach()}

    def forward(samples: object, module: torch.nn.Module) -> tuple[torch.Tensor, object]:
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH)).cuda()
        return module(tokens, positions, mask, labels=tokens), partial(loss_of)

    for _ in range(4):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=None, model=[model], num_microbatches=2, seq_length=LENGTH,
            micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        stepped, norm, _ = optimizer.step()
        print(f"stepped {stepped}, gradient norm {norm}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
