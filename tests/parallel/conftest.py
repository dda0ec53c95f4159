"""What tests of layouts need."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def compiler() -> Iterator[None]:
    with torch._dynamo.config.patch({}):
        yield
    torch.compiler.reset()
