"""Peaks of GPUs by their data sheets, for utilization on real GPUs and for the speed of virtual ones."""

import csv
from pathlib import Path

#: Dense peak in FLOP/s by the exact name that ``torch.cuda.get_device_name`` reports; ``peaks.csv`` has them in
#: TFLOP/s, with their sources.
#:
#: ``fp32`` is without tensor cores, ``tf32`` is fp32 tensors on the tensor cores; 16-bit and 8-bit products accumulate
#: in fp32. Data sheets often print the figure with 2:4 sparsity, twice what dense matrices can reach.
DENSE_PEAKS: dict[str, dict[str, float]] = {
    row["name"]: {dtype: float(row[dtype]) * 1e12 for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8") if row[dtype]}
    for row in csv.DictReader(Path(__file__).with_suffix(".csv").read_text().splitlines())
}


def dense_peak(device_name: str, dtype: str) -> tuple[float | None, str | None]:
    """Return the data sheet's dense peak of a device in FLOP/s, which is never guessed from a similar name.

    The name is that of ``torch.cuda.get_device_name``, or ``cpu``; the dtype is a column of ``peaks.csv``.

    Returns:
        ``(FLOP/s, None)``, or ``(None, reason)`` if no figure is on record.
    """
    if device_name == "cpu":
        return None, "a CPU has no data-sheet peak"
    if peak := DENSE_PEAKS.get(device_name, {}).get(dtype):
        return peak, None
    return None, f"no data-sheet peak on record for {device_name} in {dtype}"
