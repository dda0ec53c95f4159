"""Data for victims with data workers."""

from ptdbench.data.synthetic import SyntheticVectors


class Fed(SyntheticVectors):
    """Synthetic vectors from a worker process of each rank."""

    workers = 1
