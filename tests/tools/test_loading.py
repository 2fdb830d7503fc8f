"""The extension and the PyTorch that loads it."""

from __future__ import annotations

import pytest
import torch

from torch_gdn import _C, _library, info


@pytest.mark.parametrize("loaded", ["2.14.1", "2.1.0", "3.13.0"])
def test_another_minor_version_of_torch_is_an_error(loaded: str) -> None:
    with pytest.raises(ImportError, match=rf"expected torch 2\.13\.0, .* got {loaded}; build torch_gdn for it"):
        _library.check_torch("2.13.0", loaded)


@pytest.mark.parametrize("loaded", ["2.13.1", "2.13.0+cpu", "2.13.0a0+git123"])
def test_another_build_of_the_same_version_is_not(loaded: str) -> None:
    _library.check_torch("2.13.0", loaded)


def test_the_extension_knows_what_it_was_built_with() -> None:
    assert torch.__version__.split("+")[0] == _C.built_with_torch


@pytest.mark.parametrize("threads", [1, 2])
def test_info_says_how_many_threads_the_cpu_ops_have(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert info.system()["threads of torch_gdn on the CPU"] == str(threads)
    finally:
        torch.set_num_threads(before)
