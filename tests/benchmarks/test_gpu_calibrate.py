"""What ``make gpu-calibrate`` measures, in small on the CPU."""

from itertools import chain

import torch

from benchmarks.gpu_calibrate import attention, copies, measured, memory, products


def test_each_kind_of_work_gets_a_rate():
    device = torch.device("cpu")
    of = products(device, (16,), (8,), 0), attention(device, (16,)), memory(device, (2**15,)), copies(device, (2**10,))
    rows = [measured(work, device, 1e-4) for work in chain(*of)]
    assert all(row["rate"] > 0 for row in rows)
    assert len({(row["kind"], row["name"]) for row in rows}) == len(rows) == 4 + 2 + 10 + 3 + 1
