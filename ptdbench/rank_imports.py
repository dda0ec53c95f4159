"""Imports of the fork server for the ranks of ``python train.py``, whatever they will do.

A rank that imported any of it by itself would do so in each run of a sweep.
"""

import multiprocessing.popen_forkserver  # with this and with queues the description of a rank is unpickled
import multiprocessing.queues  # noqa: F401

import numpy.ma  # noqa: F401 - np.median needs it
from omegaconf import OmegaConf

import ptdbench.entry
import ptdbench.run.door  # noqa: F401

# OmegaConf builds the tables of its parser at the first interpolation.
_written = OmegaConf.create({"a": 1, "b": "${a}", "c": "${oc.env:HOME,none}-${.b}"})
OmegaConf.to_container(_written, resolve=True)
OmegaConf.select(_written, "a")
