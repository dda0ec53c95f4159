"""What tests of layouts need."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def compiler() -> Iterator[None]:
    """The compiler, as it was when the test has ended."""
    with torch._dynamo.config.patch({}):
        yield
    torch.compiler.reset()
