from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_gdn.integrations import transformers


@pytest.fixture
def serving() -> Iterator[None]:
    """Forward only, and transformers as it was afterwards."""
    with torch.no_grad():
        yield
    transformers.disable()


@pytest.fixture
def enabled(serving: None) -> None:
    """Calls of models go to torch_gdn where it takes them."""
    transformers.enable()
