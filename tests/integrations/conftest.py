from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_gdn.integrations import transformers

OLD_NAME = "error:.*(past_key_values|cache_params).* is deprecated:FutureWarning"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Makes transformers' warning of an old name of the cache an error, because no call of torch_gdn may cause it."""
    item.add_marker(pytest.mark.filterwarnings(OLD_NAME))


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
