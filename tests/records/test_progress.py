from ptdbench.records.ownership import Progress, ProgressFile, read_progress


def test_the_file_is_written_soon_now_and_then_and_at_the_end(tmp_path):
    file = ProgressFile(tmp_path, "tokens")
    assert read_progress(tmp_path) is None
    for step, now, written in ((10, 51.0, 10), (20, 52.0, 10), (30, 60.9, 10), (40, 61.0, 40), (100, 62.0, 100)):
        file.write(step, 100, 2048.0 * step, now)
        found = read_progress(tmp_path)
        assert found == Progress(written, 100, "tokens", 2048.0 * written)


def test_a_run_does_not_fail_where_it_cannot_be_written(tmp_path):
    ProgressFile(tmp_path / "gone", "tokens").write(1, 2, None, 50.0)
