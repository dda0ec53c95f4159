"""Benchmark how a PyTorch model is parallelized: ``python train.py --help``. ``ptdbench train`` is the same."""

from ptdbench import quiet

if __name__ == "__main__":
    quiet.end_on_interrupt()
    from ptdbench import entry

    entry.main()
