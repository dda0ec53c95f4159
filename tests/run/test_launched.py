"""Ranks that only torch's own variables describe, from their environment to the rendezvous."""

import socket
from types import SimpleNamespace

from ptdbench.launch import rendezvous
from ptdbench.launch.world import World, discover
from ptdbench.run import launched
from tests.launch.test_world import TORCHRUN
from tests.refusals import Abridged, refusal_of

RANK_1 = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def recognized(environ: dict[str, str], *words: str) -> World | None:
    launched.recognize(environ, words)
    return discover(environ)


def test_ranks_of_a_node_are_counted_where_nobody_says_how_many(monkeypatch):
    """A node has this rank and rank 2, another one rank 0."""
    hosts = {"host 0": b"elsewhere", "host 2": socket.gethostname().encode()}
    store = SimpleNamespace(
        set=lambda key, value: hosts.update({key: value.encode()}), multi_get=lambda keys: [hosts[key] for key in keys]
    )
    monkeypatch.setattr(rendezvous, "store", lambda: store)
    assert recognized({**RANK_1}, "model=toy", "cluster=env") == World(1, 3, 1, 2, "env")
    assert recognized(RANK_1 | {"LOCAL_WORLD_SIZE": "3"}, "cluster=env") == World(1, 3, 1, 3, "env", nodes=1)
    assert recognized({**TORCHRUN}, "cluster=env") == World(5, 8, 1, 4, "torchrun", nodes=2)


def test_typed_words_decide_and_a_missing_or_stale_variable_is_named():
    assert refusal_of(recognized, {**RANK_1}) == Abridged("RANK=1: with WORLD_SIZE=3 …; add cluster=env if …")
    missing = {name: value for name, value in RANK_1.items() if name != "LOCAL_RANK"}
    assert refusal_of(recognized, missing, "cluster=env") == (
        "LOCAL_RANK=(not set): the launcher must have set it to a whole number; "
        "set it for every rank (0 where a node has one), or omit cluster=env"
    )
    stale = RANK_1 | {"RANK": "7"}
    refusal = "env=PTDBENCH_ENV=1 RANK=7 WORLD_SIZE=3 …: must satisfy 0 <= rank < world size …; set it for every rank …"
    assert refusal_of(recognized, stale, "cluster=env") == Abridged(refusal)
