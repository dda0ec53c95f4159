"""What the benchmark of long runs asks of its options."""

import pytest

from benchmarks import long_run


def test_a_run_too_short_to_compare_its_start_with_its_end_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["long_run", "--steps", "1999"])
    with pytest.raises(SystemExit):
        long_run.main()
    assert "--steps 1999: a window may hold no save or evaluation; give at least 2500" in capsys.readouterr().err
