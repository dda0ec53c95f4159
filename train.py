"""Benchmark how a PyTorch model is parallelized: ``python train.py --help``. ``ptdbench train`` is the same."""

from ptdbench import entry

if __name__ == "__main__":
    entry.main()
