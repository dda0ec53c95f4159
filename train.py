"""Benchmark how a PyTorch model is parallelized: ``python train.py --help``. ``ptdbench train`` is the same."""

import os
import signal

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and is not ignored, as in the background
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # Ctrl-C during the imports
    from ptdbench import entry

    entry.main()
