"""The tables of ``workload=matmul``."""

from __future__ import annotations

from ptdbench.report.workload_tables import matmul_tables


def rate(median, **names):
    return {**names, "repetitions": 10, "mean": 0.9 * median, "median": median, "maximum": 1.1 * median}


def matmul(*medians, **ceiling):
    ranks = [
        {
            "rank": number,
            "device": "NVIDIA H200",
            "products": [rate(median, dtype="bf16", shape="8x8x8"), rate(1e12, dtype="bf16", shape="4x4x4")],
            "copies": [rate(4e12, kind="within the device", bytes=2**30)],
        }
        for number, median in enumerate(medians)
    ]
    best = {
        "device": "NVIDIA H200", "driver": "550", "torch": "2.15", "dtype": "bf16", "threads": None, "ranks": 2,
        "shape": "8x8x8", "flops_per_second": 7.5e14, "share_of_peak": 0.758, "peak_reason": None,
    }  # fmt: skip
    return {"ranks": ranks, "ceilings": [best | ceiling], "kept": None}


def test_figures_are_medians_over_the_ranks_and_the_slowest_is_named():
    text = matmul_tables(matmul(800e12, 600e12, 700e12), 100)
    (row,) = [line.split() for line in text.splitlines() if line.startswith("bf16") and "best" in line]
    assert row == ["bf16", "8x8x8", "(best)", "630", "700", "770", "600", "(rank", "1)", "10x"]
    assert "matrix products on 3 ranks at once (NVIDIA H200): TFLOP/s of a rank" in text


def test_copies_are_in_gigabytes():
    text = matmul_tables(matmul(800e12), 100)
    (row,) = [line.split() for line in text.splitlines() if line.startswith("within")]
    assert row == ["within", "the", "device", "1,024", "MiB", "3,600", "4,000", "4,400", "4,000", "(rank", "0)", "10x"]
    assert "copies of memory on 1 rank at once: GB/s of a rank" in text


def test_the_ceiling_beside_the_peak():
    *_, line = matmul_tables(matmul(800e12), 100).splitlines()
    assert line == "ceiling of NVIDIA H200: 750 TFLOP/s in bf16 (8x8x8), 75.8% of the peak"


def test_one_that_was_taken_beside_other_load_says_so():
    *_, line = matmul_tables(matmul(800e12, beside_load=True), 100).splitlines()
    assert line.endswith("(8x8x8), taken beside other load, 75.8% of the peak")


def test_a_cpu_has_threads_and_no_peak():
    cpu = {"device": "AMD EPYC", "threads": 1, "flops_per_second": 5.9e10, "share_of_peak": None}
    *_, line = matmul_tables(matmul(6e10, **cpu, peak_reason="a CPU has no data-sheet peak"), 100).splitlines()
    said = (
        "ceiling of AMD EPYC, 1 thread: 0.059 TFLOP/s in bf16 (8x8x8), no share of a peak: a CPU has no data-sheet peak"
    )
    assert line == said


def test_what_could_not_be_kept_is_said():
    assert matmul_tables({**matmul(1e12), "kept": "not kept for later runs: no room"}, 100).endswith(
        "later runs: no room"
    )


def test_without_copies_there_is_no_table_of_them():
    found = matmul(1e12)
    found["ranks"][0]["copies"] = []
    assert "copies" not in matmul_tables(found, 100)
