"""Figures as text."""

import pytest

from ptdbench.units import bytes_text, size_of, size_text, time_text


@pytest.mark.parametrize(("text", "value", "said"), [
    (size_text, 1023, "1023 B"), (size_text, 1024, "1 KiB"), (size_text, 1536, "1.5 KiB"),
    (size_text, 2**26, "64 MiB"), (size_text, 3 * 2**30, "3 GiB"), (bytes_text, 12, "12.0 B"),
    (bytes_text, 3.4e3, "3.40 kB"), (bytes_text, 49e6, "49.0 MB"), (bytes_text, 1.6e9, "1.60 GB"),
    (bytes_text, 5e13, "50,000 GB"), (time_text, 1.5e-5, "15.0 µs"), (time_text, 9.99e-4, "999 µs"),
    (time_text, 9.996e-4, "1.00 ms"), (time_text, 0.0123, "12.3 ms"), (time_text, 0.9996, "1.00 s"),
    (time_text, 75, "75.0 s"),
])  # fmt: skip
def test_unit_is_chosen_after_rounding(text, value, said):
    assert text(value) == said


@pytest.mark.parametrize(("text", "size"), [("20GiB", 20 << 30), ("1.5 TB", 1_500_000_000_000), ("7B", 7)])
def test_sizes_have_units(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["20", "GiB", "20 gib", "-1GB"])
def test_text_without_unit_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size"):
        size_of(text)
