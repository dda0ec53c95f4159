import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ptdbench.prediction.log import DTYPES, RECORD, VERSION, Kind, Log, Unreadable, read


def write(
    folder: Path, rank: int, kinds: bytes, version: int = VERSION, rest: bytes = b"", dtypes: Sequence[str] = ("",)
) -> None:
    """Write a log of records of these kinds, each with the name of its place, and of these dtypes."""
    records = np.zeros(len(kinds), RECORD)
    records["kind"] = [bytes([kind]) for kind in kinds]
    records["name"] = range(1, len(kinds) + 1)
    records["dtype"] = [*map(DTYPES.index, dtypes)]
    head = b"ptdlog" + bytes([version, RECORD.itemsize])
    (folder / f"{rank}.log").write_bytes(head + records.tobytes() + rest)
    names = [json.dumps({"rank": rank}), *(f"name {place}" for place in range(len(kinds)))]
    (folder / f"{rank}.names").write_text("\n".join(names))


def test_logs_are_read_by_rank_with_their_steps(tmp_path):
    write(tmp_path, 10, b"MKM")
    write(tmp_path, 2, b"KMKEMWM", rest=b"half")
    first, second = read(tmp_path)
    assert (first.facts["rank"], second.facts["rank"]) == (2, 10)
    assert [[*map(Kind, step["kind"])] for step in first.steps()] == [[Kind.KERNEL, Kind.EVENT], [Kind.WAIT]]
    assert [*first.last().records["kind"]] == [b"M", b"W", b"M"]
    assert second.names[second.records["name"][1]] == "name 1"


@pytest.mark.parametrize("in_tf32", [True, False])
def test_convolutions_in_fp32_may_be_in_tf32(tmp_path, in_tf32):
    write(tmp_path, 0, b"KKK", dtypes=("float32", "float32", "float16"))
    names = ("virtual_cudnn_convolution_wgrad", "virtual_gemm", "virtual_cudnn_convolution_forward")
    facts = json.dumps({"rank": 0, "convolutions_in_tf32": in_tf32})
    (tmp_path / "0.names").write_text("\n".join([facts, *names]))
    (log,) = read(tmp_path)
    expected = ["tf32" if in_tf32 else "float32", "float32", "float16"]
    assert [DTYPES[number] for number in log.records["dtype"]] == expected


def test_saved_log_is_the_same(tmp_path):
    write(tmp_path, 0, b"MKM")
    (log,) = read(tmp_path)
    log.save(tmp_path / "log.npz")
    again = Log.load(tmp_path / "log.npz")
    assert np.array_equal(again.records, log.records)
    assert (again.names, again.facts) == (log.names, log.facts)


def test_log_of_another_version_is_refused(tmp_path):
    write(tmp_path, 0, b"MKM", version=VERSION + 1)
    with pytest.raises(Unreadable, match=f"0.log: no log of version {VERSION}"):
        read(tmp_path)
