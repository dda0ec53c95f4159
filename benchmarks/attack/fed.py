"""Data for the victims that shall have data workers."""

from __future__ import annotations

from ptdbench.data.synthetic import SyntheticVectors


class Fed(SyntheticVectors):
    """Synthetic vectors that a process beside each rank makes."""

    workers = 1
