from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_gdn
from tests.helpers.devices import launched
from tests.helpers.errors import assert_same_bits
from torch_gdn import reference
from torch_gdn_check.registry.attention import pool
from torch_gdn_check.registry.inputs import Call, to_device

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_call(tokens: int, slots: list[int], layout: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> Call:
    """Makes 3 heads of 64 in blocks of 5. key and value are parts of one projection, with more tokens than slots."""
    projection = torch.randn(tokens, 9, 64).to(dtype)
    caches = dict(zip(("key_cache", "value_cache"), pool(4, 5, 3, 64, cache_dtype, layout), strict=True))
    return {"key": projection[:, 3:6], "value": projection[:, 6:]} | caches | {"slot_mapping": torch.tensor(slots)}


def memory(x: Tensor) -> Tensor:
    """Returns all of the storage, including the gaps between pages."""
    return x.as_strided((x.untyped_storage().size() // x.element_size(),), (1,), 0).cpu()


def check(device: torch.device, call: Call) -> None:
    moved = to_device(call, device)
    launched(device, "reshape_and_cache", torch_gdn.reshape_and_cache, **moved)
    reference.reshape_and_cache(**call)
    for name in ("key_cache", "value_cache"):
        assert call[name].isfinite().any()
        assert_same_bits(name, memory(moved[name]), memory(call[name]))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("layout", ["pages", "padded", "apart"])
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_go_to_their_slots_and_nowhere_else(
    device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, layout: str
) -> None:
    check(device, make_call(8, [17, -1, 0, 4, 5, -7, 19], layout, dtype, cache_dtype))


def test_values_of_another_size(device: torch.device) -> None:
    call = make_call(3, [1, 8, 3], "pages", torch.float32, torch.bfloat16)
    call |= {"value": call["value"][..., :10], "value_cache": pool(4, 5, 3, 10, torch.bfloat16, "apart")[1]}
    check(device, call)


def test_no_tokens(device: torch.device) -> None:
    call = to_device(make_call(2, [], "pages", torch.float32, torch.float32), device)
    torch_gdn.reshape_and_cache(**(call | {"slot_mapping": call["slot_mapping"].long()}))
    assert call["key_cache"].isnan().all() and call["value_cache"].isnan().all()


def test_pages_of_keys_and_values_that_overlap(device: torch.device) -> None:
    call = to_device(make_call(3, [1, 2, 3], "pages", torch.float32, torch.float32), device)
    shifted = call["key_cache"].as_strided(call["key_cache"].shape, call["key_cache"].stride(), 63)
    with pytest.raises(ValueError, match="reshape_and_cache_: key_cache: expected memory of its own"):
        torch_gdn.reshape_and_cache(**(call | {"value_cache": shifted}))


@pytest.mark.parametrize(
    ("blocks", "D", "strides", "words"),
    [
        (2000, 128, (300, 300), None),
        (2000, 128, (300, 301), "got memory that it shares with value_cache"),  # they share memory from page 45 on
        (200_000, 2, (12, 16), "got strides .*, too complex to compare with those of value_cache"),
    ],
)
def test_many_pages_in_one_storage(blocks: int, D: int, strides: tuple[int, int], words: str | None) -> None:
    """A page is one token's key, followed by its value."""
    storage, new = torch.zeros(max(strides) * blocks, dtype=torch.bfloat16), torch.ones(1, 1, D, dtype=torch.bfloat16)
    caches = [storage.as_strided((blocks, 1, 1, D), (stride, D, D, 1), i * D) for i, stride in enumerate(strides)]
    if words is None:
        torch_gdn.reshape_and_cache(new, new, *caches, torch.tensor([1999]))
        assert storage.nonzero().flatten().tolist() == list(range(1999 * 300, 1999 * 300 + 256))
        return
    with pytest.raises(ValueError, match=f"^reshape_and_cache_: key_cache: expected memory of its own, {words}"):
        torch_gdn.reshape_and_cache(new, new, *caches, torch.tensor([0]))
