"""The repeated blocks of a module."""

from collections.abc import Sequence

from torch import nn


def repeated(module: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a module, by name.

    Blocks are the members of the longest ``ModuleList`` or ``Sequential`` of one class whose members consist of several
    modules, of others whose members repeat each other, as in a decoder, and of shorter lists of these classes, as in a
    ResNet. Lists within a block, such as heads and experts, do not count: their members need not run on every rank.
    """
    lists = {
        part: list(part.children())
        for part in module.modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len({type(child) for child in part.children()}) == 1
    }
    within = {
        part for children in lists.values() if _are_blocks(children) for child in children for part in child.modules()
    }
    outer = [children for part, children in lists.items() if part not in within and len(children) > 1]
    of_several = [children for children in outer if list(children[0].children())]
    if not of_several:
        return {}
    longest = max(of_several, key=len)
    # An encoder's and a decoder's blocks are of two classes.
    kinds = {type(children[0]) for children in of_several if children is longest or _are_blocks(children)}
    of_kind = {child for children in lists.values() for child in children if type(child) in kinds}
    blocks: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        if part in of_kind and not any(name.startswith(f"{around}.") for around in blocks):
            blocks[name] = part
    return blocks


def _are_blocks(members: Sequence[nn.Module]) -> bool:
    """Whether members of a list repeat each other, unlike the stages of an image network, which grow wider."""
    shapes = {tuple(weight.shape for weight in member.parameters()) for member in members}
    return len(shapes) < len(members) and type(members[0]) not in (nn.ModuleList, nn.Sequential)
