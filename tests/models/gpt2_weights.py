"""The weights of Hugging Face's GPT-2 under the names of :mod:`ptdbench.models.gpt`."""

from collections.abc import Mapping

from torch import Tensor

GPT2_NAMES = {
    "wte": "embedding.token",
    "wpe": "embedding.position",
    "h": "blocks",
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.output",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
    "ln_f": "head.norm",
    "lm_head": "head.projection",
}


def from_gpt2(state: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The weights of a ``transformers`` ``GPT2LMHeadModel``, for :meth:`GPT.load_state_dict`.

    Args:
        state: Its state dict. Its linear layers are stored ``[inputs, outputs]`` and come out transposed; queries, keys
            and values of all heads, which stand one after the other, come out head by head.
        heads: Attention heads of a block.

    Raises:
        KeyError: If the state holds a tensor that GPT-2 has not.
    """
    weights = {}
    for name, tensor in state.items():
        *modules, kind = name.removeprefix("transformer.").split(".")
        is_linear = modules[-1].startswith("c_") and kind == "weight"
        turned = tensor.t() if is_linear else tensor
        weights[f"{_renamed(modules)}.{kind}"] = _by_head(turned, heads) if modules[-1] == "c_attn" else turned
    return weights


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    """``[3 * width, ...]`` from the order (query, key or value; head; feature) to (head; query, key or value; ...)."""
    return tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def _renamed(modules: list[str]) -> str:
    """``["h", "0", "attn", "c_attn"]`` becomes ``"blocks.0.attention.qkv"``."""
    if modules[0] != "h":
        return GPT2_NAMES[".".join(modules)]
    return f"{GPT2_NAMES['h']}.{modules[1]}.{GPT2_NAMES['.'.join(modules[2:])]}"
