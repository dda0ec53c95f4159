import pytest

from ptdbench.setup import gpus
from tests.refusals import refusal_of

OWN = """
defaults: [h100, _self_]
name: mine
gpu:
  name: NVIDIA H100 96GB
  memory: 94GiB
"""


def test_every_gpu_has_its_figures_and_their_source():
    models = {name: gpus.load(name) for name in gpus.names()}
    assert {"h100", "l4", "gb200", "rtx_4090"} <= {*models}
    assert all(model.source and model.memory > 8 << 30 for model in models.values())
    assert models["h200"].multiprocessors == models["h100"].multiprocessors == 132  # by its defaults


def test_file_of_ones_own_is_a_gpu(tmp_path):
    (tmp_path / "mine.yaml").write_text(OWN)
    model = gpus.load(str(tmp_path / "mine.yaml"))
    assert (model.name, model.memory, model.l2) == ("NVIDIA H100 96GB", 94 << 30, 52428800)


@pytest.mark.parametrize(
    ("text", "message"),
    [("gpu: {memory: much}", "must be"), ("name: mine", "describes no GPU"), ("{", "describes no GPU")],
)
def test_unusable_file_is_refused(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    assert message in refusal_of(gpus.load, str(tmp_path / "mine.yaml"))


def test_missing_file_is_named(tmp_path):
    assert "missing.yaml: describes no GPU" in refusal_of(gpus.load, str(tmp_path / "missing.yaml"))
