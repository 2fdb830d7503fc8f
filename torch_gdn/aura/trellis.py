"""A trellis code for normal values: each value's label is chosen by its own bits and by those of the values before it.

A vector of n values at b bits each is a stream of n b bits that closes into a ring. Value i is `table[w_i]`, where the
window w_i is the L bits of the stream that end with bit (i + 1) b - 1:

    w_i = sum over j < L of 2^j stream[((i + 1) b - L + j) mod (n b)]

The newest b bits of a window, which are value i's own, are its highest. It shares the others with the window before:

    w_i = w_(i-1) >> b | new_i << (L - b)

Bit s of the stream is bit s % 8 of byte s / 8, so in little-endian words of 32 bits it is bit s % 32 of word s / 32. A
value is thus decoded without the values before it: a shift of the (at most two) words that hold its window, a mask, and
a load from the table. The windows of the first values begin in the stream's last bits.

Tables are for values of variance 1, and odd: table[2^L - 1 - w] = -table[w]. Their labels are whole numbers from -127
to 127 times a step, at no loss of accuracy. A kernel needs 2^(L - 1) bytes of a table: 128 for L = 8, one word in each
of 32 banks. docs/numerics.md says what a value costs to decode.

Tables are trained by `torch_gdn.aura.trellis_training`. Encoding is Viterbi's algorithm (1967): 2^(L - b) states, the
bits that the next window shares, and 2^L windows to compare for each value. The ring takes two passes: one over the
values around the stream's joint finds the state there, one over all of them begins and ends in that state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_gdn.aura.codebooks import read, require

__all__ = ["RATES", "decode", "encode", "table"]

RATES = {6: (2, 3, 4), 8: (2, 3, 4), 10: (5,)}  # bits a value, by the bits of a window
FILE = "trellis.json"
REACH = 32  # values on each side of the joint that the first pass reads
CHUNK = 256  # vectors encoded at a time: 2^L costs of each stay in the processor's cache


def table(window: int, bits: int) -> Tensor:
    """The labels of a code's windows.

    Args:
        window: bits of a window: 6, 8 or 10.
        bits: bits of a value: 2, 3 or 4 with 6 or 8, 5 with 10.

    Returns:
        table: [2 ** window], float32. Whole numbers from -127 to 127 times a step.

    Raises:
        ValueError: a window or number of bits that has no table.

    Example:
        >>> from torch_gdn.aura import trellis
        >>> labels = trellis.table(6, 2)
        >>> labels.shape, bool((labels == -labels.flip(0)).all())
        (torch.Size([64]), True)
    """
    require("trellis.table: window", window, tuple(RATES))
    require("trellis.table: bits", bits, RATES[window])
    found = read(FILE)[str(window)][str(bits)]
    return odd(torch.tensor(found["labels"]).float()) * found["step"]


def odd(half: Tensor) -> Tensor:
    """The table whose first half this is."""
    return torch.cat([half, -half.flip(0)])


def encode(x: Tensor, table: Tensor, bits: int) -> Tensor:
    """The streams whose decoded values are nearest to x.

    Args:
        x: [.., n], any floating dtype. Values of about variance 1, n bits a multiple of 8 and at least the window.
        table: [2 ** L], float32. Labels, L greater than bits.
        bits: of a value.

    Returns:
        stream: [.., n * bits / 8], uint8.

    Raises:
        ValueError: sizes other than these.

    Example:
        >>> import torch
        >>> from torch_gdn.aura import trellis
        >>> labels = trellis.table(6, 2)
        >>> x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
        >>> stream = trellis.encode(x, labels, 2)
        >>> stream.shape, 0.07 < (trellis.decode(stream, labels, 2) - x).square().mean() < 0.09
        (torch.Size([1000, 16]), tensor(True))
    """
    require_sizes(x.shape[-1] * bits, table, bits)
    flat = x.reshape(-1, x.shape[-1]).float()
    found = [nearest_windows(part, table, bits) for part in flat.split(CHUNK)] or [flat.long()]
    return pack(torch.cat(found), table, bits).reshape(*x.shape[:-1], x.shape[-1] * bits // 8)


def decode(stream: Tensor, table: Tensor, bits: int) -> Tensor:
    """The values of streams.

    Args:
        stream: [.., n * bits / 8], uint8.
        table: [2 ** L], any floating dtype. The table it was encoded with.
        bits: of a value.

    Returns:
        x: [.., n], the table's dtype.

    Raises:
        ValueError: a table or stream of other sizes.

    Example:
        >>> import torch
        >>> from torch_gdn.aura import trellis
        >>> labels = trellis.table(6, 2)
        >>> stream = torch.tensor([0b00000001, 0b11000000], dtype=torch.uint8)  # 8 values, the first one's bits: 01
        >>> trellis.decode(stream, labels, 2)[1] == labels[0b000111]
        tensor(True)
    """
    require_sizes(stream.shape[-1] * 8, table, bits)
    return table[windows(stream, table, bits)]


def require_sizes(stream_bits: int, table: Tensor, bits: int) -> None:
    L = window_bits(table)
    if table.dim() != 1 or len(table) != 1 << L or not 0 < bits < L:
        raise ValueError(f"trellis: table: expected [2 ** L] labels with L over {bits} bits, got {list(table.shape)}")
    if stream_bits % 8 != 0 or stream_bits % bits != 0 or stream_bits < L:
        raise ValueError(f"trellis: expected a stream of whole bytes and values of {bits} bits, got {stream_bits} bits")


def window_bits(table: Tensor) -> int:
    return table.numel().bit_length() - 1


def pack(found: Tensor, table: Tensor, bits: int) -> Tensor:
    """The stream [N, bytes] of windows [N, n]: the newest bits of each."""
    new = found >> (window_bits(table) - bits)
    ones = (new[..., None] >> torch.arange(bits) & 1).flatten(1).unflatten(1, (-1, 8))
    return (ones << torch.arange(8)).sum(-1).to(torch.uint8)


def windows(stream: Tensor, table: Tensor, bits: int) -> Tensor:
    """[.., n] int64: each value's window."""
    L = window_bits(table)
    ones = (stream.long()[..., None] >> torch.arange(8) & 1).flatten(-2)
    values = torch.arange(ones.shape[-1] // bits)
    at = ((values[:, None] + 1) * bits - L + torch.arange(L)) % ones.shape[-1]
    return (ones[..., at] << torch.arange(L)).sum(-1)


def nearest_windows(x: Tensor, table: Tensor, bits: int) -> Tensor:
    """[N, n] int64: the windows of the ring whose labels are nearest to x [N, n], in two passes."""
    n = x.shape[1]
    reach = min(REACH, n // 2)
    around = torch.cat([x[:, n - reach :], x[:, :reach]], 1).t().contiguous()
    costs = forward(around, table, bits, None)
    _, joint = backward(costs, around, table, bits, costs[-1].argmin(0), first=reach)
    values = x.t().contiguous()
    costs = forward(values, table, bits, joint)
    found, _ = backward(costs, values, table, bits, joint)
    return found


def forward(x: Tensor, table: Tensor, bits: int, start: Tensor | None) -> Tensor:
    """[n + 1, states, N]: the least squared error of the values before each step, by the state that they end in.

    x: [n, N]. start: [N], the only state to begin in; None for any.
    """
    steps, N = x.shape
    choices, states = 1 << bits, len(table) >> bits
    labels = table.view(choices, states, 1)  # by the new bits, then the shared ones
    costs = torch.zeros(steps + 1, states, N)
    if start is not None:
        costs[0] = torch.inf
        costs[0].scatter_(0, start[None], 0.0)
    cost = torch.empty(choices, states, N)
    for i in range(steps):
        torch.sub(labels, x[i], out=cost)
        cost.mul_(cost).add_(costs[i])
        torch.amin(cost.view(states, choices, N), 1, out=costs[i + 1])  # by the next state, then the bits it drops
    return costs


def backward(costs: Tensor, x: Tensor, table: Tensor, bits: int, end: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """The windows [N, n - first] of the values from `first` on of the best paths to the states `end`, and the states
    [N] before them."""
    state, dropped = end, torch.arange(1 << bits)[:, None]
    found = []
    for i in range(len(x) - 1, first - 1, -1):
        windows = (state << bits) + dropped
        before = windows & (len(table) >> bits) - 1
        cost = costs[i].gather(0, before) + (table[windows] - x[i]) ** 2
        window = windows.gather(0, cost.argmin(0, keepdim=True))[0]
        found.append(window)
        state = window & (len(table) >> bits) - 1
    return torch.stack(found[::-1], 1), state
