"""The order of a comparison with another implementation: what both need of a GPU, and what is left of it."""

from __future__ import annotations

import sys

from tests.conftest import ROOT


def test_memory_is_measured_while_no_model_is_in_this_process(monkeypatch):
    """A fresh process needs all of a GPU of 80 GB for gpt_xl; two such models here would have taken most of it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import model_speed

    done = []
    monkeypatch.setattr(sys, "argv", ["model_speed.py", "--json", "--device", "cpu", "--modes", "false", "layers"])
    monkeypatch.setattr(model_speed.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(model_speed.torch, "set_num_threads", lambda _: None)
    for name, found in {"_memory": {}, "_times": {}, "release": None}.items():
        monkeypatch.setattr(model_speed, name, lambda *_, name=name, found=found: (done.append(name), found)[1])
    model_speed.main()
    assert done == ["_memory", "_times", "release"] * 2
