import pytest
import torch
from torch import nn

from ptdbench.parallel.ddp import bucket_size
from ptdbench.parallel.strategy import Strategy
from tests.parallel.made import gpt, laid_out, refused
from tests.parallel.ranks import pretended
from tests.parallel.ten_steps import by_engine


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


def test_a_weight_without_a_gradient_is_named_where_ddp_waits_for_it():
    def trained(micro_batch: int) -> None:
        model = gpt(layers=2, vocabulary=20)
        model.unused = nn.LayerNorm(2, bias=False, device="meta")
        by_engine(*laid_out(Strategy(replicate="auto"), model, 4, micro_batch))

    with pretended(1):
        trained(4)  # by a static graph
        assert refused(trained, 2) == (
            "parallel.static_graph=false: without a static graph DDP needs a gradient of each weight, and none came "
            "for unused.weight; freeze what is not used: requires_grad_(False)"
        )
