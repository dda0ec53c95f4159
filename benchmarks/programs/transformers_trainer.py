"""A Llama of transformers, trained by its Trainer on made tokens, as ``accelerate launch`` has it laid out."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH, VOCABULARY = 512, 32000


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Take four steps."""
    shape = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16, vocab_size=VOCABULARY
    )
    with tempfile.TemporaryDirectory() as folder:
        how = TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=4, bf16=True, report_to=[], logging_steps=1,
            save_strategy="no", max_grad_norm=1.0,
        )  # fmt: skip
        Trainer(LlamaForCausalLM(shape), how, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
