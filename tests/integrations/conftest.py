from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_gdn.integrations import transformers


@pytest.fixture
def serving() -> Iterator[None]:
    """Turns gradients off, and restores transformers afterwards."""
    with torch.no_grad():
        yield
    transformers.disable()


@pytest.fixture
def enabled(serving: None) -> None:
    """Enables torch_gdn for the calls of models that it takes."""
    transformers.enable()
