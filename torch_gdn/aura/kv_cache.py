from __future__ import annotations

import os

import torch
from torch import Tensor

from torch_gdn.aura import file
from torch_gdn.aura.codebooks import DIMENSIONS, aura_signs
from torch_gdn.aura.coded_tensor import DTYPES, CodedTensor, dtype_name, entries, has_tile_means
from torch_gdn.aura.exact_rows import ExactRows
from torch_gdn.aura.scheme import Scheme
from torch_gdn.aura.tables import require
from torch_gdn.reference.aura import TILE

EXACT = ("exact.keys", "exact.values")  # names in a file


class KVCache:
    """Stores the keys and values of one attention layer in a few bits each, and attends to them in that form.

    A vector is divided by its norm and rotated by random signs and a Hadamard matrix. Each coordinate then becomes the
    index of the nearest centroid. The norm is kept in float16, corrected so that the decoded vector has it. Attention
    rotates the query instead of every key, and rotates its output back. `append` adds tokens in order; the cache takes
    memory for `capacity` tokens at once.

    The first `sinks` tokens and the last `tail` tokens stay in `dtype`, and attention merges them with the codes. A
    tile of min(tail, 128) tokens becomes codes when more than `tail` tokens and a tile are exact, so most decoding
    steps only store their token. If you append a long prompt at once, all of it but the tail becomes codes at once.
    Each tile of 128 keys has the mean of each channel, which is subtracted before the rotation. This needs a tail of
    32, 64, 96, or at least 128.

    Args:
        scheme: a `Scheme` or its name; start with "4v4t".
        batch, kv_heads: B and HK.
        head_dim: D, 64, 80, 96, 128, 256 or 512.
        capacity: how many tokens fit, until `reserve` grows it.
        device: "cpu" or "mps". Default: "cpu".
        dtype: the dtype of keys, values and queries: bfloat16, float16 or float32. Default: bfloat16.
        seed: gives the signs: 2 * seed those of keys, 2 * seed + 1 those of values. Use another in each layer.
            Default: 0.
        tail: how many of the newest tokens stay exact, at least. 0 keeps none; 32 to 256 are worth their memory.
            Default: 128.
        sinks: how many of the first tokens stay exact. Padding counts. Default: 4.

    Raises:
        ValueError, TypeError: If an argument is not as above, or if a method gets a tensor that does not fit.

    Example:
        >>> import torch, torch_gdn
        >>> cache = torch_gdn.aura.KVCache("8v4", batch=1, kv_heads=2, head_dim=64, capacity=100, dtype=torch.float32)
        >>> k, v = torch.randn(1, 2, 10, 64), torch.randn(1, 2, 10, 64)
        >>> cache.append(k, v)
        >>> q = torch.randn(1, 8, 1, 64)  # of the newest token, in 8 query heads
        >>> cache.attend(q).shape, len(cache), cache.bytes_used
        (torch.Size([1, 8, 1, 64]), 10, 10240)
        >>> torch.equal(cache.decoded()[0], k)  # all of so few tokens are the tail
        True
    """

    def __init__(
        self,
        scheme: Scheme | str,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        *,
        seed: int = 0,
        tail: int = 128,
        sinks: int = 4,
    ) -> None:
        sizes = {"batch": (batch, 1), "kv_heads": (kv_heads, 1), "capacity": (capacity, 0)}
        for argument, (value, lowest) in (sizes | {"tail": (tail, 0), "sinks": (sinks, 0)}).items():
            if value < lowest:
                raise ValueError(f"KVCache: {argument}: expected at least {lowest}, got {value}")
        if dtype not in DTYPES:
            raise TypeError(f"KVCache: dtype: expected bfloat16, float16 or float32, got {dtype_name(dtype)}")
        require("KVCache: head_dim", head_dim, DIMENSIONS)
        self.scheme = scheme if isinstance(scheme, Scheme) else Scheme(scheme)
        self.kv_heads, self.head_dim, self.dtype, self.seed = kv_heads, head_dim, dtype, seed
        self.tail, self.sinks, self.capacity = tail, sinks, capacity
        self.length = self.coded = 0  # the number of all tokens, and of codes

        def coded(bits: int, centroids: Tensor, its_seed: int, tile_means: bool = False) -> CodedTensor:
            shape = (batch, kv_heads, self._most_codes(capacity))
            signs = aura_signs(head_dim, its_seed).to(device)
            return CodedTensor(bits, signs, centroids.to(device), shape, tile_means)

        key_codebook, value_codebook = self.scheme.codebooks(head_dim)
        self.keys = coded(self.scheme.key_bits, key_codebook, 2 * seed, has_tile_means(tail))
        self.values = coded(self.scheme.value_bits, value_codebook, 2 * seed + 1)
        like = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.exact = ExactRows(like, sinks, tail, capacity)
        self.slots = self._new_slots()

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return (
            f"KVCache({self.scheme.name!r}, batch={self.batch}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"capacity={self.capacity}, length={self.length}, device={self.device}, dtype={self.dtype}, "
            f"tail={self.tail}, sinks={self.sinks})"
        )

    @property
    def batch(self) -> int:
        return self.keys.norms.shape[0]

    @property
    def device(self) -> torch.device:
        return self.keys.norms.device

    @property
    def bytes_used(self) -> int:
        """Returns the bytes of the tokens in the cache: codes and exact rows."""
        code_bytes = self.coded * self.scheme.bytes_per_token(self.head_dim)
        if self.keys.tile_means is not None:
            code_bytes += entries("tile_means", self.coded) * self.head_dim * self.keys.tile_means.itemsize
        row_bytes = self._exact_length * 2 * self.head_dim * self.dtype.itemsize
        return self.batch * self.kv_heads * (code_bytes + row_bytes)

    @property
    def bytes_reserved(self) -> int:
        """Returns the bytes of memory that the cache has taken for `capacity` tokens."""
        code_bytes = sum(x.nbytes for coded in (self.keys, self.values) for x in coded.token_tensors().values())
        return code_bytes + self.exact.keys.nbytes + self.exact.values.nbytes

    @property
    def _exact_length(self) -> int:
        return self.length - self.coded

    def append(self, k: Tensor, v: Tensor) -> None:
        """Appends the keys and values of T tokens, and encodes whole tiles of the tokens that leave the tail.

        Args:
            k, v: [B, HK, T, D], the cache's dtype. Any strides.

        Raises:
            ValueError: a shape or device that is not as above, or more tokens than fit.
            TypeError: another dtype.
        """
        for name, x in (("k", k), ("v", v)):
            self._check("append", name, x, self.kv_heads)
        if k.shape != v.shape:
            raise ValueError(f"append: v: expected shape {list(k.shape)} like k, got {list(v.shape)}")
        tokens = k.shape[2]
        if self.length + tokens > self.capacity:
            expected = f"at most {self.capacity - self.length} more tokens (capacity {self.capacity})"
            raise ValueError(f"append: k: expected {expected}, got {tokens}: see reserve")
        surplus = self.exact.surplus(self._exact_length + tokens)
        if surplus > 0:
            k, v = self._make_codes(k, v, surplus)
        if k.shape[2] > 0:
            self._write(k, v)

    def _make_codes(self, k: Tensor, v: Tensor, surplus: int) -> tuple[Tensor, Tensor]:
        """Encodes the oldest tokens after the sinks at once. They may be exact rows or new ones. Returns the new ones
        that stay exact.
        """
        held = self._exact_length
        moved = min(surplus, max(0, held - self.sinks))
        new_sinks = max(0, min(k.shape[2], self.sinks - held))
        if new_sinks > 0:
            self._write(k[:, :, :new_sinks], v[:, :, :new_sinks])
        coded = new_sinks + surplus - moved
        result = (k[:, :, new_sinks:coded], v[:, :, new_sinks:coded])
        if moved > 0:
            rows = self.exact.rows(self.sinks, self.sinks + moved)
            result = rows if coded == 0 else (torch.cat((rows[0], result[0]), 2), torch.cat((rows[1], result[1]), 2))
        self._encode(*result)
        self.length += coded - new_sinks
        if moved > 0:
            self.exact.drop_oldest(moved, held)
        return k[:, :, coded:], v[:, :, coded:]

    def _write(self, k: Tensor, v: Tensor) -> None:
        self.exact.write(self._exact_length, k, v)
        self.length += k.shape[2]

    def _encode(self, k: Tensor, v: Tensor) -> None:
        slots = self.slots[self.coded : self.coded + k.shape[2]]
        self.keys.append(k, slots, self.coded)
        self.values.append(v, slots, self.coded)
        self.coded += k.shape[2]

    def attend(
        self,
        q: Tensor,
        causal: bool = True,
        *,
        scale: float | None = None,
        window: int = 0,
        starts: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Computes softmax attention of the last L positions to every token in the cache.

        Args:
            q: [B, HQ, L, D], the cache's dtype; HQ is a multiple of HK, and query head h has KV head h // (HQ / HK).
            causal: whether query i, at position len - L + i, sees no later position. Default: True.
            scale: of the scores. Default: D ** -0.5.
            window: how many positions up to its own a query sees (causal alone); 0 for all. Default: 0.
            starts: [B] int32 or int64, the first position of each row that is not left padding. Default: zeros.
            sinks: [HQ] float32, one more logit a head, of a value of zeros (GPT-OSS). Default: none.

        Returns:
            o: [B, HQ, L, D], q's dtype. Zeros for a query that sees no key.

        Raises:
            ValueError, TypeError: a tensor or option that is not as above.
        """
        self._check("attend", "q", q, None)
        k, v = self.keys, self.values
        tensors = (k.codes, k.norms, k.codebook, k.signs, v.codes, v.norms, v.codebook, v.signs)
        masks = (starts, sinks, scale, causal, None, window)
        held = self._exact_length
        rows = (self.exact.keys, self.exact.values) if held > 0 else (None, None)
        exact = (*rows, min(self.sinks, held), held if held > 0 else None)
        return torch.ops.gdn.aura_attention.default(q, *tensors, *masks, None, self.coded, *exact, k.tile_means)

    def decoded(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Returns decoded keys and values, [B, HK, len, D] each, in bfloat16, float16 or float32."""
        keys, values = self.keys.decoded(self.coded, dtype), self.values.decoded(self.coded, dtype)
        return self.exact.around(keys, values, self._exact_length) if self._exact_length > 0 else (keys, values)

    def reserve(self, capacity: int) -> None:
        """Grows the cache to `capacity` tokens by a copy. Does nothing if that many fit already."""
        if capacity > self.capacity:
            self._resize(capacity, 0, self.coded, 0, self._exact_length)

    def crop(self, length: int) -> None:
        """Keeps the first `length` tokens. A negative `length` drops the last -length tokens.

        Codes stay codes. If you drop more tokens than the tail has, the next tokens fill the tail.
        """
        kept = length if length >= 0 else self.length + length
        if not 0 <= kept <= self.length:
            raise ValueError(f"crop: length: expected from {-self.length} to {self.length}, got {length}")
        self.coded = min(self.coded, max(0, kept - self.sinks))
        self.length = kept

    def keep_last(self, tokens: int, capacity: int) -> None:
        """Drops all but the last `tokens` tokens, as a sliding window does, and takes new memory for `capacity`.

        If keys have means, codes leave in whole tiles, so that up to 127 tokens more stay. The cache must have no
        sinks.
        """
        if self.sinks > 0:
            raise ValueError(f"keep_last: expected a cache with sinks=0, got {self.sinks}: they would be forgotten")
        if not 0 <= tokens <= min(self.length, capacity):
            most = min(self.length, capacity)
            raise ValueError(f"keep_last: tokens: expected from 0 to {most}, got {tokens}")
        held = self._exact_length
        exact = min(held, tokens)
        coded = self.kept_by(tokens) - exact
        self._resize(max(capacity, exact + coded), self.coded - coded, self.coded, held - exact, held)
        self.length, self.coded = exact + coded, coded

    def kept_by(self, tokens: int) -> int:
        """Returns how many tokens `keep_last` keeps."""
        if tokens <= self._exact_length or self.keys.tile_means is None:
            return tokens
        return self.length - (self.length - tokens) // TILE * TILE

    def reorder(self, rows: Tensor) -> None:
        """Replaces row b by row rows[b], as beam search does. `rows` [B'] may repeat rows and leave some out."""
        if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64) or rows.shape[0] == 0:
            got = f"{dtype_name(rows.dtype)} of shape {list(rows.shape)}"
            raise ValueError(f"reorder: rows: expected shape [B'], int32 or int64, B' >= 1, got {got}")
        if rows.device.type == "cpu" and not 0 <= rows.min() <= rows.max() < self.batch:
            raise ValueError(f"reorder: rows: expected rows from 0 to {self.batch - 1}, got {rows.tolist()}")
        for coded in (self.keys, self.values):
            coded.select(rows.to(self.device))
        self.exact.select(rows.to(self.device))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tokens, tables, signs and seed to a safetensors file. Requires the package `safetensors`.

        Example:
            >>> import os, tempfile, torch, torch_gdn
            >>> cache = torch_gdn.aura.KVCache("4v4", 1, 1, 64, capacity=8, dtype=torch.float32)
            >>> cache.append(torch.randn(1, 1, 5, 64), torch.randn(1, 1, 5, 64))
            >>> path = os.path.join(tempfile.mkdtemp(), "cache.safetensors")
            >>> cache.save(path)
            >>> torch_gdn.aura.KVCache.load(path)
            KVCache('4v4', batch=1, kv_heads=1, head_dim=64, capacity=5, length=5, device=cpu, dtype=torch.float32, \
tail=128, sinks=4)
        """
        file.write(path, self.content())

    def content(self) -> file.Content:
        """Returns the tokens, on the CPU, as a file stores them."""
        tensors = {
            f"{name}.{part}": x.cpu().contiguous()
            for name, coded in (("key", self.keys), ("value", self.values))
            for part, x in coded.parts(self.coded).items()
        }
        rows = self.exact.rows(0, self._exact_length)
        tensors |= {name: x.cpu().contiguous() for name, x in zip(EXACT, rows, strict=True) if self._exact_length > 0}
        return file.Content(self.scheme, self.seed, self.dtype, self.tail, self.sinks, tensors)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], device: torch.device | str = "cpu", capacity: int | None = None
    ) -> KVCache:
        """Reads a file that `save` wrote.

        Args:
            path: the file.
            device: of the cache. Default: "cpu".
            capacity: as in `KVCache`. Default: the number of tokens in the file.

        Raises:
            ValueError: not such a file, of another version, or one whose parts do not fit together.
        """
        return cls.of(file.read(path), device, capacity)

    @classmethod
    def of(cls, content: file.Content, device: torch.device | str, capacity: int | None = None) -> KVCache:
        """Returns a cache with this content. The other arguments are those of `load`."""
        batch, heads, coded_tokens, head_dim = content.shape
        length = content.tokens
        capacity = length if capacity is None else capacity
        if capacity < length:
            raise ValueError(f"load: capacity: expected at least the {length} tokens of the file, got {capacity}")
        options = {"seed": content.seed, "tail": content.tail, "sinks": content.sinks}
        cache = cls(content.scheme, batch, heads, head_dim, capacity, device, content.dtype, **options)
        cache._reserve_codes(coded_tokens)
        for name, coded in (("key", cache.keys), ("value", cache.values)):
            coded.fill(content.parts(name, coded.parts(coded_tokens)))
        cache.length, cache.coded = length, coded_tokens
        cache._fill_exact(content)
        return cache

    def _fill_exact(self, content: file.Content) -> None:
        held, most = self._exact_length, self.exact.most(self.capacity)
        at_least = min(self.sinks, self.length)
        file.require(at_least <= held <= most, f"from {at_least} to {most} tokens that are no codes", held)
        if held == 0:
            return
        like = torch.empty(self.batch, self.kv_heads, held, self.head_dim, dtype=self.dtype, device="meta")
        rows = content.parts("exact", {"keys": like, "values": like})
        self.exact.write(0, rows["keys"].to(self.device), rows["values"].to(self.device))

    def _most_codes(self, capacity: int) -> int:
        """Returns how many of `capacity` tokens can be codes: there are codes only once the tail is full."""
        return max(0, capacity - self.sinks - self.tail)

    def _reserve_codes(self, count: int) -> None:
        """Makes room for `count` codes. A cache that was cropped can have codes without a full tail."""
        if count > self.slots.shape[0]:
            for coded in (self.keys, self.values):
                coded.resize(count, 0, self.coded)
            self.slots = self._new_slots()

    def _resize(self, capacity: int, first: int, last: int, first_row: int, last_row: int) -> None:
        """Takes memory for `capacity` tokens and keeps the codes from first to last and the same for exact rows."""
        for coded in (self.keys, self.values):
            coded.resize(max(self._most_codes(capacity), last - first), first, last)
        self.exact.resize(capacity, first_row, last_row)
        self.capacity = capacity
        self.slots = self._new_slots()

    def _new_slots(self) -> Tensor:
        return torch.arange(self.keys.norms.shape[2], dtype=torch.int32, device=self.device)

    def _check(self, method: str, name: str, x: Tensor, heads: int | None) -> None:
        norms, given = self.keys.norms, x.shape
        batch, device = norms.shape[0], norms.device
        fits = len(given) == 4 and given[0] == batch and given[3] == self.head_dim
        if not fits or (heads is not None and given[1] != heads):
            expected = f"[{batch}, {heads or 'HQ'}, {'T' if heads else 'L'}, {self.head_dim}]"
            raise ValueError(f"{method}: {name}: expected shape {expected}, got {list(given)}")
        if x.dtype != self.dtype:
            expected = f"dtype {dtype_name(self.dtype)} like the cache"
            raise TypeError(f"{method}: {name}: expected {expected}, got {dtype_name(x.dtype)}")
        if x.device != device:
            raise ValueError(f"{method}: {name}: expected a tensor on {device} like the cache, got {x.device}")
