"""Tests that a KVCache holds what was appended, in order, and that its attention is exact over this content."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import torch_gdn.aura.scheme
from tests.helpers.devices import kernels_run
from tests.helpers.errors import assert_close, assert_same_bits
from torch_gdn import reference
from torch_gdn.aura import KVCache, Scheme, codebooks, kv_cache
from torch_gdn.aura.coded_tensor import CodedTensor

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
SCHEMES = ("8v8", "8v4", "5v5", "4v4", "4v2", "3v3", "2v2", "8v4t", "4v2t", "3v5t")


def coded_cache(*args: Any, **options: Any) -> KVCache:
    """Returns a cache whose tokens are all codes. `test_aura_tail.py` tests exact tokens."""
    return KVCache(*args, tail=0, sinks=0, **options)


def filled(
    scheme: Scheme | str,
    device: torch.device | str = "cpu",
    *,
    T: int = 20,
    D: int = 64,
    dtype: torch.dtype = torch.float32,
    capacity: int = 32,
) -> tuple[KVCache, Tensor, Tensor]:
    cache = coded_cache(scheme, 2, 2, D, capacity, device, dtype, seed=3)
    k, v = (torch.randn(2, 2, T, D).to(dtype).to(device) for _ in range(2))
    cache.append(k, v)
    return cache, k, v


def exact(cache: KVCache, q: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Returns PyTorch's float64 attention over the cache, decoded in float64."""
    q, k, v = q.cpu().double(), *(decoded(coded, cache.length) for coded in (cache.keys, cache.values))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, **options)


def decoded(coded: CodedTensor, length: int) -> Tensor:
    parts = (x.cpu() for x in (*coded.filled(length), *coded.tables))
    return reference.aura_decode(*parts, dtype=torch.float64)


def causal(L: int, T: int) -> Tensor:
    return torch.ones(L, T, dtype=torch.bool).tril(T - L)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_attention_to_what_is_held(device: torch.device, scheme: str) -> None:
    cache, _, _ = filled(scheme, device)
    q = torch.randn(2, 6, 5, 64).to(device)
    with kernels_run(device, "aura_flash_p1", "aura_flash_p2"):
        o = cache.attend(q)
    assert o.dtype == torch.float32 and o.shape == q.shape
    assert_close("o", o, exact(cache, q, causal(5, 20)), BOUNDS[o.dtype], head_dim=1)


@pytest.mark.sweep(2, of="dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [80, 128])
def test_attention_in_16_bits(device: torch.device, dtype: torch.dtype, D: int) -> None:
    cache, _, _ = filled("8v4", device, D=D, dtype=dtype)
    q = torch.randn(2, 4, 1, D).to(dtype).to(device)
    o = cache.attend(q)
    assert o.dtype == dtype
    assert_close("o", o, exact(cache, q, causal(1, 20)), BOUNDS[dtype], head_dim=1)


def test_options_of_attend(device: torch.device) -> None:
    cache, _, _ = filled("4v4", device)
    q, starts = torch.randn(2, 6, 5, 64).to(device), torch.tensor([0, 12])
    o = cache.attend(q, scale=0.3, window=6, starts=starts.to(device))
    positions, queries = torch.arange(20), torch.arange(15, 20)[:, None]
    mask = (positions <= queries) & (positions > queries - 6) & (positions >= starts[:, None, None, None])
    assert_close("o", o, exact(cache, q, mask, scale=0.3), 1e-5, head_dim=1)
    o = cache.attend(q, causal=False)
    assert_close("o", o, exact(cache, q, torch.ones(5, 20, dtype=torch.bool)), 1e-5, head_dim=1)


def test_sinks_of_attend(device: torch.device) -> None:
    """A sink acts as a key with the sink's logit and a value of zeros."""
    cache, _, _ = filled("8v8", device)
    q, sinks = torch.randn(2, 2, 1, 64).to(device), torch.tensor([0.5, 2.0])
    o = cache.attend(q, sinks=sinks.to(device))
    k, v = decoded(cache.keys, 20), decoded(cache.values, 20)
    scores = 0.125 * (q.cpu().double() @ k.transpose(-1, -2))
    weights = torch.cat([scores, sinks.double().view(1, 2, 1, 1).expand(2, 2, 1, 1)], -1).softmax(-1)
    assert_close("o", o, weights[..., :-1] @ v, 1e-5, head_dim=1)


def test_decoded_is_what_was_appended(device: torch.device) -> None:
    cache, k, v = filled("8v8", device)
    for x, values, coded in zip((k, v), cache.decoded(), (cache.keys, cache.values), strict=True):
        assert values.dtype == torch.float32 and values.device == x.device
        assert_close("decoded", values, decoded(coded, 20), 1e-6, head_dim=1)
        assert_close("decoded", values, x.cpu().double(), 0.01, head_dim=1)
    assert cache.decoded(torch.float16)[0].dtype == torch.float16


def parts(cache: KVCache) -> list[Tensor]:
    return [*cache.keys.filled(cache.length), *cache.values.filled(cache.length)]


def assert_same_content(cache: KVCache, other: KVCache) -> None:
    assert len(cache) == len(other) and cache.batch == other.batch
    for ours, theirs in zip(parts(cache), parts(other), strict=True):
        assert_same_bits("cache", ours, theirs)


def test_appending_in_parts_is_appending_at_once(device: torch.device) -> None:
    whole, k, v = filled("3v3", device)
    parted = coded_cache("3v3", 2, 2, 64, 20, device, torch.float32, seed=3)
    for first, last in ((0, 7), (7, 7), (7, 8), (8, 20)):
        parted.append(k[:, :, first:last], v[:, :, first:last])
    assert_same_content(parted, whole)


def test_the_layout_of_the_model_need_not_be_the_caches() -> None:
    """The keys have the layout that a projection returns, [B, T, HK, D], and are views [B, HK, T, D] of it."""
    cache, k, v = filled("4v4")
    other = coded_cache("4v4", 2, 2, 64, 32, dtype=torch.float32, seed=3)
    other.append(k.transpose(1, 2).contiguous().transpose(1, 2), v.transpose(1, 2).contiguous().transpose(1, 2))
    assert_same_content(other, cache)


def test_cropping_forgets(device: torch.device) -> None:
    cache, k, v = filled("4v2", device)
    cache.crop(9)
    cache.crop(-1)
    assert len(cache) == 8
    first = coded_cache("4v2", 2, 2, 64, 8, device, torch.float32, seed=3)
    first.append(k[:, :, :8], v[:, :, :8])
    assert_same_content(cache, first)
    q = torch.randn(2, 2, 1, 64).to(device)
    assert_same_bits("o", cache.attend(q), first.attend(q))
    cache.append(k[:, :, 8:], v[:, :, 8:])
    assert_same_content(cache, filled_again(k, v, "4v2"))


def filled_again(k: Tensor, v: Tensor, scheme: str) -> KVCache:
    cache = coded_cache(scheme, *k.shape[:2], k.shape[3], k.shape[2], k.device, k.dtype, seed=3)
    cache.append(k, v)
    return cache


@pytest.mark.parametrize("rows", [[1, 0], [1, 1], [0], [0, 1, 1]])
def test_reordering_rows(device: torch.device, rows: list[int]) -> None:
    cache, k, v = filled("4v4", device)
    cache.reorder(torch.tensor(rows).to(device))
    assert_same_content(cache, filled_again(k[rows], v[rows], "4v4"))


def test_reserving_keeps_what_is_held(device: torch.device) -> None:
    cache, k, v = filled("8v4", device, capacity=20)
    with pytest.raises(ValueError, match="at most 0 more tokens"):
        cache.append(k[:, :, :1], v[:, :, :1])
    cache.reserve(10)
    assert cache.capacity == 20
    cache.reserve(21)
    assert cache.capacity == 21
    cache.append(k[:, :, :1], v[:, :, :1])
    again = filled_again(torch.cat([k, k[:, :, :1]], 2), torch.cat([v, v[:, :, :1]], 2), "8v4")
    assert_same_content(cache, again)


def test_keys_values_and_layers_have_signs_of_their_own() -> None:
    caches = [KVCache("4v4", 1, 1, 64, 0, seed=seed) for seed in (0, 1)]
    signs = [coded.signs for cache in caches for coded in (cache.keys, cache.values)]
    expected = [reference.aura_signs(64, seed) for seed in range(4)]
    assert all(map(torch.equal, signs, expected))


def test_a_scheme_is_shown_as_it_is_made() -> None:
    scheme = Scheme("4v2", table="origin")
    assert eval(repr(scheme)) == scheme


@pytest.mark.parametrize(
    ("scheme", "bytes_per_token", "ratio"),
    [
        ("8v8", 260, 1.97),
        ("8v4", 196, 2.61),
        ("4v4", 132, 3.88),
        ("5v5", 164, 3.12),
        ("4v2", 100, 5.12),
        ("3v3t", 100, 5.12),
        ("2v2", 68, 7.53),
    ],
)
def test_bytes_per_token(scheme: str, bytes_per_token: int, ratio: float) -> None:
    cache = coded_cache(scheme, 2, 3, 128, capacity=10)
    cache.append(torch.randn(2, 3, 5, 128).bfloat16(), torch.randn(2, 3, 5, 128).bfloat16())
    assert cache.bytes_reserved == 2 * 3 * 10 * bytes_per_token
    assert cache.bytes_used == 2 * 3 * 5 * bytes_per_token
    assert cache.bytes_used == sum(x.nbytes for x in (y.clone() for y in parts(cache)))
    assert cache.scheme.ratio(128) == pytest.approx(ratio, abs=0.005)


def test_the_origin_table_can_be_asked_for() -> None:
    cache = KVCache(Scheme("4v8", table="origin"), 1, 1, 128, 0)
    assert torch.equal(cache.keys.codebook, codebooks.codebook(4, 128, "origin"))
    assert torch.equal(cache.values.boundaries, codebooks.boundaries(codebooks.codebook(8, 128, "origin")))


@pytest.mark.parametrize("scheme", [Scheme("3v2"), Scheme("3v2t")], ids=repr)
def test_saving_and_loading(device: torch.device, tmp_path: Path, scheme: Scheme) -> None:
    cache, _, _ = filled(scheme, device, dtype=torch.bfloat16)
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", device, capacity=23)
    assert_same_content(loaded, cache)
    assert (loaded.scheme, loaded.dtype, loaded.seed, loaded.capacity) == (cache.scheme, torch.bfloat16, 3, 23)
    q = torch.randn(2, 2, 1, 64).to(device, torch.bfloat16)
    assert_same_bits("o", loaded.attend(q), cache.attend(q))
    loaded.append(q, q)
    cache.append(q, q)
    assert_same_content(loaded, cache)
    assert (tmp_path / "cache").stat().st_size < cache.bytes_used + 4096


def test_a_file_holds_its_own_tables(tmp_path: Path) -> None:
    """A file therefore stays readable when tables or signs change."""
    from safetensors.torch import load_file, save_file

    cache, _, _ = filled("4v4")
    cache.save(tmp_path / "cache")
    metadata = metadata_of(tmp_path / "cache")
    tensors = load_file(tmp_path / "cache")
    tensors["key.codebook"] = 2 * tensors["key.codebook"]
    tensors["value.signs"] = -tensors["value.signs"]
    save_file(tensors, tmp_path / "other", metadata)
    loaded = KVCache.load(tmp_path / "other")
    assert_close("keys", loaded.decoded()[0], 2 * decoded(cache.keys, 20), 1e-6)
    assert_close("values", loaded.decoded()[1], -decoded(cache.values, 20), 1e-6)


def test_a_file_of_version_1(tmp_path: Path) -> None:
    """Its norms are float32, and it does not say how long the tail is or how many sinks there are."""
    from safetensors.torch import load_file, save_file

    cache, _, _ = filled("4v4")
    cache.save(tmp_path / "cache")
    metadata = {name: text for name, text in metadata_of(tmp_path / "cache").items() if name not in ("tail", "sinks")}
    tensors = load_file(tmp_path / "cache")
    old = {name: x.float() if name.endswith("norms") else x for name, x in tensors.items()}
    save_file(old, tmp_path / "old", metadata | {"version": "1"})
    loaded = KVCache.load(tmp_path / "old")
    assert_same_content(loaded, cache)
    assert (loaded.tail, loaded.sinks) == (0, 0)


@pytest.mark.parametrize(("tail", "changed"), [(128, {"version": "2"}), (32, {"tile_means": "False"})])
def test_a_file_without_means(tmp_path: Path, tail: int, changed: dict[str, str]) -> None:
    """Its codes stand for whole keys. Version 2 has no means, and version 3 had no means with a tail of 32."""
    from safetensors.torch import load_file, save_file

    cache = KVCache("4v4", 1, 2, 64, 272 + tail, dtype=torch.float32, tail=tail)
    cache.append(*(torch.randn(1, 2, cache.capacity, 64) + shift for shift in (1, 0)))
    cache.save(tmp_path / "cache")
    metadata, tensors = metadata_of(tmp_path / "cache"), load_file(tmp_path / "cache")
    means = tensors.pop("key.tile_means").float().repeat_interleave(128, 2)
    assert metadata.pop("tile_means") == "True"
    save_file(tensors, tmp_path / "old", metadata | changed)
    loaded = KVCache.load(tmp_path / "old", capacity=1000)
    coded = slice(4, 4 + loaded.coded)
    whole, without = cache.decoded()[0], loaded.decoded()[0]
    assert_close("keys", without[:, :, coded], (whole[:, :, coded] - means).double(), 1e-6)
    loaded.append(torch.randn(1, 2, 200, 64) + 1, torch.randn(1, 2, 200, 64))
    assert loaded.keys.tile_means is not None
    has_means = loaded.keys.tile_means.any(-1).all(1)[0, :3]
    assert has_means.tolist() == [False, False, True]  # the new tile has means


def metadata_of(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.metadata()


BAD_FILES = {
    "no metadata": (
        lambda tensors, metadata: metadata.clear(),
        "expected format 'torch_gdn.aura' version '1' or '2' or '3', got None",
    ),
    "version 4": (lambda tensors, metadata: metadata.update(version="4"), "got 'torch_gdn.aura' version '4'"),
    "tail": (lambda tensors, metadata: metadata.update(tail="-1"), "expected a tail, got '-1'"),
    "exact rows": (
        lambda tensors, metadata: tensors.update({"exact.keys": torch.zeros(2, 2, 3, 64)}),
        "expected from 0 to 0 tokens that are no codes, got 3",
    ),
    "sinks without rows": (lambda tensors, metadata: metadata.update(sinks="2"), "expected from 2 to 2 tokens that"),
    "means of vectors": (
        lambda tensors, metadata: metadata.update(means="True"),
        "expected means 'False', because means of vectors are no longer read, got 'True'",
    ),
    "a scheme": (lambda tensors, metadata: metadata.update(scheme="6v6"), "Scheme: name: expected"),
    "dtype": (
        lambda tensors, metadata: metadata.update(dtype="int8"),
        "expected dtype bfloat16, float16, float32, got",
    ),
    "seed": (lambda tensors, metadata: metadata.update(seed="x"), "expected a seed, got 'x'"),
    "no codes": (lambda tensors, metadata: tensors.pop("value.codes"), "expected value.codes of shape .*, got None"),
    "short codes": (
        lambda tensors, metadata: tensors.update({"key.codes": tensors["key.codes"][..., 1:].clone()}),
        r"expected key.codes of shape \[2, 2, 20, 8\], int32, got int32 of shape \[2, 2, 20, 7\]",
    ),
    "no key norms": (lambda tensors, metadata: tensors.pop("key.norms"), "expected key.norms of shape"),
    "another D": (
        lambda tensors, metadata: tensors.update({"key.signs": torch.ones(60)}),
        "KVCache: head_dim: expected one of .*, got 60",
    ),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_file_that_does_not_fit(tmp_path: Path, what: str) -> None:
    from safetensors.torch import load_file, save_file

    change, message = BAD_FILES[what]
    filled("4v4")[0].save(tmp_path / "good")
    tensors, metadata = load_file(tmp_path / "good"), metadata_of(tmp_path / "good")
    change(tensors, metadata)
    save_file(tensors, tmp_path / "bad", metadata)
    with pytest.raises(ValueError, match=message):
        KVCache.load(tmp_path / "bad")


def test_a_file_that_is_no_safetensors_file_or_larger_than_asked_for(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no cache")
    with pytest.raises(ValueError, match="load: path: expected a safetensors file"):
        KVCache.load(tmp_path / "text")
    filled("4v4")[0].save(tmp_path / "cache")
    with pytest.raises(ValueError, match="load: capacity: expected at least the 20 tokens of the file, got 19"):
        KVCache.load(tmp_path / "cache", capacity=19)


def test_a_decoding_step_compiles_without_a_graph_break(device: torch.device) -> None:
    """It compiles three times: for the first step, for a step that makes codes, and for all other steps."""
    torch._dynamo.reset()
    cache, plain = (KVCache("8v4", 2, 2, 64, 32, device, torch.float32, tail=3, sinks=2) for _ in range(2))
    k, v = (torch.randn(2, 2, 20, 64).to(device) for _ in range(2))
    cache.append(k, v)
    plain.append(k, v)

    def step(cache: KVCache, k: Tensor, v: Tensor, q: Tensor) -> Tensor:
        cache.append(k, v)
        return cache.attend(q)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for _ in range(9):
        k, v, q = (torch.randn(2, heads, 1, 64).to(device) for heads in (2, 2, 4))
        assert_same_bits("o", compiled(cache, k, v, q), step(plain, k, v, q))
    assert len(cache) == 29 and counter.frame_count == 3


K = torch.zeros(2, 2, 1, 64)
ERRORS = {
    "no such scheme": (lambda cache: Scheme("6v4"), "Scheme: name: expected '<bits>v<bits>' .*, got '6v4'"),
    "no code of the trellis": (lambda cache: Scheme("8v5t"), "or with a 't' behind if one is at most 4, got '8v5t'"),
    "a trellis of the origin": (
        lambda cache: Scheme("4v4t", table="origin"),
        "Scheme: table: expected 'lloyd-max' for '4v4t', got 'origin'",
    ),
    "no such table": (lambda cache: Scheme("4v4", table="x"), "Scheme: table: expected one of 'lloyd-max'"),
    "no batch": (lambda cache: KVCache("4v4", 0, 1, 64, 5), "KVCache: batch: expected at least 1, got 0"),
    "head_dim": (lambda cache: KVCache("4v4", 1, 1, 100, 5), "KVCache: head_dim: expected one of 64, .*, got 100"),
    "capacity": (lambda cache: KVCache("4v4", 1, 1, 64, -5), "KVCache: capacity: expected at least 0, got -5"),
    "dtype": (lambda cache: KVCache("4v4", 1, 1, 64, 5, dtype=torch.float64), "KVCache: dtype: expected bfloat16"),
    "tail": (lambda cache: KVCache("4v4", 1, 1, 64, 5, tail=-1), "KVCache: tail: expected at least 0, got -1"),
    "sinks": (lambda cache: KVCache("4v4", 1, 1, 64, 5, sinks=-1), "KVCache: sinks: expected at least 0, got -1"),
    "a window of sinks": (
        lambda cache: KVCache("4v4", 1, 1, 64, 5, sinks=1).keep_last(0, 5),
        "keep_last: expected a cache with sinks=0, got 1",
    ),
    "k's heads": (lambda cache: cache.append(K[:, :1], K), r"append: k: expected shape \[2, 2, T, 64\], got \[2, 1"),
    "k's dimensions": (lambda cache: cache.append(K[0], K), r"append: k: expected shape \[2, 2, T, 64\], got \[2, 1"),
    "v's batch": (lambda cache: cache.append(K, K[:1]), r"append: v: expected shape \[2, 2, T, 64\], got \[1, 2"),
    "v's length": (lambda cache: cache.append(K, K[:, :, :0]), r"append: v: expected shape \[2, 2, 1, 64\] like k"),
    "k's dtype": (
        lambda cache: cache.append(K.half(), K),
        "append: k: expected dtype float32 like the cache, got float16",
    ),
    "k's device": (lambda cache: cache.append(K.to("meta"), K), "append: k: expected a tensor on cpu like the cache"),
    "too many": (
        lambda cache: cache.append(*[K.expand(2, 2, 13, 64)] * 2),
        r"append: k: expected at most 12 more tokens \(capacity 32\), got 13",
    ),
    "q's size": (lambda cache: cache.attend(K[..., :32]), r"attend: q: expected shape \[2, HQ, L, 64\], got \[2, 2, 1"),
    "q's dtype": (
        lambda cache: cache.attend(K.half()),
        "attend: q: expected dtype float32 like the cache, got float16",
    ),
    "q's heads": (lambda cache: cache.attend(K[:, :1].expand(2, 3, 1, 64)), "multiple"),
    "crop beyond": (lambda cache: cache.crop(21), "crop: length: expected from -20 to 20, got 21"),
    "crop below": (lambda cache: cache.crop(-21), "crop: length: expected from -20 to 20, got -21"),
    "rows": (
        lambda cache: cache.reorder(torch.tensor([0, 2])),
        r"reorder: rows: expected rows from 0 to 1, got \[0, 2\]",
    ),
    "no rows": (lambda cache: cache.reorder(torch.tensor([]).long()), "reorder: rows: expected shape"),
    "float rows": (lambda cache: cache.reorder(torch.tensor([0.0])), "reorder: rows: expected shape"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors_say_what_was_expected(what: str) -> None:
    call, message = ERRORS[what]
    cache, _, _ = filled("4v4")
    before = [x.clone() for x in parts(cache)]
    with pytest.raises((ValueError, TypeError), match=message):
        call(cache)
    assert len(cache) == 20 and all(map(torch.equal, parts(cache), before))


@pytest.mark.parametrize("module", [torch_gdn.aura.scheme, codebooks, kv_cache], ids=lambda module: module.__name__)
def test_examples_of_the_docstrings_run(module: Any) -> None:
    failed, attempted = doctest.testmod(module)
    assert failed == 0 and attempted > 0
