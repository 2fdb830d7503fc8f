from __future__ import annotations

import pytest
import torch

import torch_gdn
from tests.helpers.devices import launched, ready
from torch_gdn import recording
from torch_gdn_check.fake_mps import fake_mps


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.int32, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bytes_", [8, 4096, 4104, 8 * 4096, 8 * 4096 + 8])
def test_every_byte_arrives(device: torch.device, dtype: torch.dtype, bytes_: int) -> None:
    """The copy goes to a view that starts at an odd element, whose neighbours must not change."""
    src = torch.randint(0, 2, (bytes_ // dtype.itemsize, 2)).to(dtype)[:, 1]  # this has strides
    whole = torch.zeros(len(src) + 2, dtype=dtype, device=device)
    if device.type == "mps" and bytes_ <= 8 * 4096:
        launched(device, "copy_from_host", torch_gdn.copy_from_host_, whole[1:-1], src)
    else:
        torch_gdn.copy_from_host_(whole[1:-1], src)
    assert torch.equal(whole.cpu(), torch.nn.functional.pad(src.to(torch.int64), (1, 1)).to(dtype))


def test_a_launch_copies_no_more_bytes_than_it_can_count() -> None:
    """The source is on the GPU."""
    ready("mps")
    with fake_mps(), recording() as recorded:
        torch_gdn.copy_from_host_(*(torch.empty(3 << 30, dtype=torch.uint8, device="mps") for _ in range(2)))
    assert [launch.threadgroups[0] * launch.threads for launch in recorded.launches] == [1 << 30] * 3


def test_the_host_may_write_its_array_at_once() -> None:
    """PyTorch's own copy, if not awaited, would read the numbers that the host writes later."""
    src, dst = torch.arange(64), torch.zeros(64, dtype=torch.int64, device=ready("mps"))
    torch_gdn.copy_from_host_(dst, src)
    src.fill_(-1)
    assert dst.tolist() == list(range(64))
