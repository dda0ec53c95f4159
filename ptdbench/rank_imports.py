"""What the fork server imports for the ranks of ``python train.py``, whatever they will do.

A rank that imported any of it by itself would do so once in each run of a sweep.
"""

from __future__ import annotations

from omegaconf import OmegaConf

import ptdbench.run  # noqa: F401


def _read_interpolations() -> None:
    """Let OmegaConf's parser build its tables, which it does when it reads its first interpolation."""
    OmegaConf.to_container(OmegaConf.create({"a": 1, "b": "${a}", "c": "${oc.env:HOME,none}-${.b}"}), resolve=True)


_read_interpolations()
