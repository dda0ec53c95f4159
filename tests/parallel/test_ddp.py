import pytest
import torch
from torch import nn

from ptdbench.parallel.ddp import bucket_size


@pytest.mark.parametrize(("millions", "mebibytes"), [(1, 25), (124, 25), (355, 67.7), (1300, 100)])
def test_buckets_grow_with_the_model_within_limits(millions, mebibytes):
    with torch.device("meta"):
        model = nn.Linear(1000, millions * 1000, bias=False)
    assert bucket_size(model) == pytest.approx(mebibytes, abs=0.1)


def test_what_is_not_trained_is_in_no_bucket():
    with torch.device("meta"):
        model = nn.Linear(1000, 10**6)
    model.requires_grad_(False)
    assert bucket_size(model) == 25
