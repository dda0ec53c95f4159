"""Accounts of ranks on virtual GPUs, combined into one of the whole run."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from ptdbench.records.schema import Messages, Virtual

T = TypeVar("T")

#: Fields with a number for each rank, besides those by kind.
_OF_RANKS = (
    "allocated_bytes", "peak_steps", "reserved_bytes", "outside_bytes", "communicators", "host_seconds", "flops"
)  # fmt: skip


def merged(accounts: Sequence[Virtual], stands_for: Mapping[int, int] | None = None) -> Virtual:
    """Combine accounts of different ranks; ``stands_for``: how many ranks each stands for, by default itself only.

    The bytes of a message are known only if all ranks that send it know theirs.
    """
    first, ranks = accounts[0], [account.ranks or [] for account in accounts]
    kinds = dict.fromkeys(kind for account in accounts for kind in account.kernels or ())
    operations = dict.fromkeys(operation for account in accounts for operation in account.messages or ())
    counts = [sum((stands_for or {}).get(rank, 1) for rank in of_account) for of_account in ranks]
    return Virtual(
        device=first.device,
        ranks=[*chain(*ranks)],
        context_bytes=first.context_bytes,
        first_step=None,
        **{name: _joined(getattr(account, name) for account in accounts) for name in _OF_RANKS},
        kernels={kind: [*chain(*(_kernels(account, kind) for account in accounts))] for kind in kinds},
        messages={operation: _mean(operation, accounts, counts) for operation in operations},
        reason=next((account.reason for account in accounts if account.reason), None),
    )


def _kernels(account: Virtual, kind: str) -> list[int]:
    return (account.kernels or {}).get(kind) or [0] * len(account.ranks or ())


def _joined(lists: Iterable[list[T] | None]) -> list[T] | None:
    present = [numbers for numbers in lists if numbers is not None]
    return [*chain(*present)] if present else None


def _mean(operation: str, accounts: Sequence[Virtual], counts: Sequence[int]) -> Messages:
    """Average an operation over all ranks; ``counts``: how many ranks each account stands for."""
    of_accounts = [(account.messages or {}).get(operation) for account in accounts]
    sent = [(messages, count) for messages, count in zip(of_accounts, counts, strict=True) if messages]
    sizes = [messages.bytes * count for messages, count in sent if messages.bytes is not None]
    return Messages(
        calls=sum(messages.calls * count for messages, count in sent) / sum(counts),
        bytes=sum(sizes) / sum(counts) if len(sizes) == len(sent) else None,
    )
