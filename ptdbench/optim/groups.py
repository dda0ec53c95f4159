"""Parameter groups by rule: the function of a weight in the model determines its updates."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

Rule = Literal["matrices", "kernels", "embeddings", "head", "vectors"]

#: Every rule, and whether weight decay applies to its weights under ``train.decay=matrices``; not to biases and the
#: scales of norms, as in GPT-3 (Brown et al. 2020) and He et al., "Bag of Tricks", 2019, section 3.1.
DECAYED: Mapping[Rule, bool] = {"matrices": True, "kernels": True, "embeddings": True, "head": True, "vectors": False}


def rules(model: nn.Module) -> dict[nn.Parameter, Rule]:
    """Return the rule of each parameter of a whole model.

    ``vectors``: fewer than two dimensions, such as biases and the scales of norms. ``embeddings``: weights of
    :class:`torch.nn.Embedding`. ``head``: weight of the model's last :class:`torch.nn.Linear`, its output projection.
    ``kernels``: more than two dimensions, as in convolutions. ``matrices``: all others.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    of_weight: dict[nn.Parameter, Rule] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            rule: Rule = "matrices" if weight.dim() == 2 else "kernels"
            if weight.dim() < 2:
                rule = "vectors"
            elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
                rule = "embeddings"
            elif linear[-1:] == [module]:
                rule = "head"
            of_weight.setdefault(weight, rule)
    return of_weight


def in_groups(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], model: nn.Module, not_decayed: Collection[Rule]
) -> Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
    """Return a function that creates an optimizer of named parameters, with a group for each rule in use.

    Args:
        make: Creates an optimizer of parameter groups, each with its ``rule``.
        model: The whole model before it is laid out; a tied weight has one rule under both of its names.
        not_decayed: The rules whose weights have no weight decay.
    """
    of_weight = rules(model)
    rule_of = {name: of_weight[weight] for name, weight in model.named_parameters(remove_duplicate=False)}

    def made(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups: dict[Rule, dict[str, Any]] = {rule: {"params": [], "rule": rule} for rule in DECAYED}
        for name, weight in named:
            if weight.requires_grad:
                groups[rule_of[name]]["params"].append(weight)
        for rule in not_decayed:
            groups[rule]["weight_decay"] = 0.0
        return make([group for group in groups.values() if group["params"]])

    return made
