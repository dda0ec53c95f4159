import torch

from ptdbench.parallel.strategy import Strategy
from tests.parallel.made import gpt, laid_out
from tests.parallel.ranks import pretended
from tests.parallel.ten_steps import by_engine


def test_powersgd_never_synchronizes(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    with pretended(1):
        model = laid_out(Strategy(replicate="auto", gradients="powersgd"), gpt(layers=1, vocabulary=20), 4)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        by_engine(*model)
        assert any("error" in name for name in model[0].own_state())  # it has compressed
    assert waits == []
