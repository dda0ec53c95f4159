"""What a manifest says, and that a changed one or changed files are noticed."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest

from ptdbench.checkpoints import checkpoint_dir
from ptdbench.checkpoints.checkpoint_dir import Broken, Manifest, Stamp

CONTENT = b"0123456789" * 1000


@pytest.fixture
def written(tmp_path: Path) -> Manifest:
    """Three files and their manifest."""
    names = ("__0_0.distcp", "__1_0.distcp", ".metadata")
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(CONTENT[number:])
    files = {name: checkpoint_dir.stamp(tmp_path / name) for name in names}
    described = Manifest(7, 2, {"width": 16}, {"losses": [0.1, 1e-17, 3.0]}, files, "2.15.0", 1234.5)
    checkpoint_dir.write_manifest(tmp_path, described)
    return described


def test_a_stamp_is_size_and_sha256(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT * 500)  # more than one block
    assert checkpoint_dir.stamp(tmp_path / "file") == Stamp(5_000_000, hashlib.sha256(CONTENT * 500).hexdigest())


def test_what_was_written_is_read_and_is_strict_json(tmp_path, written):
    assert checkpoint_dir.read_manifest(tmp_path) == written
    checkpoint_dir.check_sizes(tmp_path, written)
    checkpoint_dir.check_contents(tmp_path, written, 0, 1)
    facts = {"loss": math.nan, "scale": math.inf, "pair": (1, 2)}
    checkpoint_dir.write_manifest(tmp_path, Manifest(7, 2, {}, facts, {}, "2.15.0", 1.0))
    assert checkpoint_dir.read_manifest(tmp_path).facts == {"loss": None, "scale": None, "pair": [1, 2]}
    json.loads((tmp_path / "manifest.json").read_text(), parse_constant=pytest.fail)
    with pytest.raises(TypeError):
        checkpoint_dir.write_manifest(tmp_path, Manifest(7, 2, {}, {"what": object()}, {}, "2.15.0", 1.0))


def broken(check: object, *arguments: object) -> str:
    with pytest.raises(Broken) as caught:
        check(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "manifest.json is missing"),
        *((content, "manifest.json is not a manifest") for content in ("", '{"step": 7, "wor', "[]", "{}")),
        ('{"sha256": "00", "step": 7}', "manifest.json does not match its checksum"),
    ],
)
def test_what_is_no_manifest(tmp_path, written, content, told):
    path = tmp_path / "manifest.json"
    path.unlink() if content is None else path.write_text(content)
    assert broken(checkpoint_dir.read_manifest, tmp_path) == told


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path, written):
    path = tmp_path / "manifest.json"
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        try:
            assert checkpoint_dir.read_manifest(tmp_path) == written  # white space may change
        except Broken:
            continue
        assert content[position : position + 1] in b" \n"


@pytest.mark.parametrize(
    "other",
    [
        {"model": []}, {"model": None}, {"facts": []}, {"facts": {"segments": 3}}, {"facts": {"evaluations": [1]}},
        {"facts": {"scaler": []}}, {"step": "7"}, {"step": -1}, {"world_size": True}, {"torch": ...},
        {"files": {"__0_0.distcp": {"bytes": "1", "sha256": "00"}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_stamped_anew_with_values_of_other_types_or_without_one_is_none(tmp_path, written, other):
    body = json.loads((tmp_path / "manifest.json").read_text()) | other
    body = {name: value for name, value in body.items() if name != "sha256" and value is not ...}
    (tmp_path / "manifest.json").write_text(json.dumps(body | {"sha256": checkpoint_dir._digest(body)}))
    assert broken(checkpoint_dir.read_manifest, tmp_path) == "manifest.json is not a manifest"


def test_missing_and_truncated_files(tmp_path, written):
    (tmp_path / "__1_0.distcp").write_bytes(CONTENT[1:-3])
    assert broken(checkpoint_dir.check_sizes, tmp_path, written) == "__1_0.distcp has 9996 bytes instead of 9999"
    (tmp_path / "__1_0.distcp").unlink()
    told = broken(checkpoint_dir.check_sizes, tmp_path, written)
    assert told == "__1_0.distcp cannot be read (No such file or directory)"
    assert broken(checkpoint_dir.check_contents, tmp_path, written, 0, 1) == told


def test_a_manifest_does_not_lead_out_of_its_directory(tmp_path, written):
    elsewhere = Manifest(7, 2, {}, {}, {"../file": Stamp(0, "")}, "2.15.0", 1.0)
    assert broken(checkpoint_dir.check_sizes, tmp_path, elsewhere) == "../file is not a file name"
