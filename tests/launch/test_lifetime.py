"""Processes and those that start them."""

import os
import signal
import subprocess
import time
from threading import Thread

from ptdbench.launch import lifetime


def test_wait_hears_a_signal_that_another_thread_takes() -> None:
    """As of a process that is being started: nothing interrupts the wait of the main thread."""

    def signal_itself() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: process.terminate())
    other = Thread(target=signal_itself)
    with subprocess.Popen(["sleep", "60"]) as process:
        other.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            assert lifetime.wait_for(process) == -signal.SIGTERM
        finally:
            other.join()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
            signal.signal(signal.SIGUSR1, before)
