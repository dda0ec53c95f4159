"""Commands as a person types them."""

import sys

import pytest

from ptdbench import __main__ as command


@pytest.fixture
def ptdbench(monkeypatch, capsys):
    """Types a command on a wide terminal: exit status, output, lines of errors."""
    monkeypatch.setenv("COLUMNS", "500")

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["ptdbench", *map(str, words)])
        try:
            status: object = command.main()
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        return status, said.out, said.err.splitlines()

    return call
