"""The trellis code of AURA: what its streams mean, and how the nearest one is found.

A vector of n values at b bits each is a stream of n b bits that closes into a ring. Value i is `table[w_i]`, where the
window w_i is the L bits of the stream that begin with bit i b:

    w_i = sum over j < L of 2^j stream[(i b + j) mod (n b)]

The lowest b bits of a window are value i's own. It shares the others with the windows behind it:

    w_(i+1) = w_i >> b | new << (L - b)

Bit s of the stream is bit s % 8 of byte s / 8, so in little-endian words of 32 bits it is bit s % 32 of word s / 32. If
the stream ends within a word, the rest of the word repeats its first bits. A value is thus decoded without the others:
a shift of the (at most two) words that hold its window, a mask, and a load from the table.

Encoding is Viterbi's algorithm (1967): 2^(L - b) states, the bits that the next window shares, and 2^L windows to
compare for each value. The ring takes two passes: one over the values around the stream's joint finds the state there,
one over all of them begins and ends in that state.
"""

import torch
from torch import Tensor

__all__ = ["nearest_windows", "pack", "window_bits", "windows"]

REACH = {6: 16}  # values on each side of the joint in the first pass, by bits of a window; 32 for others
CHUNK = 256  # vectors encoded at a time, so that their 2^L costs stay in the processor's cache


def window_bits(table: Tensor) -> int:
    return table.numel().bit_length() - 1


def pack(states: Tensor, bits: int) -> Tensor:
    """Returns the stream [N, bytes] of windows [N, n], which consists of the lowest bits of each."""
    ones = (states[..., None] >> torch.arange(bits) & 1).flatten(1).unflatten(1, (-1, 8))
    return (ones << torch.arange(8)).sum(-1).to(torch.uint8)


def windows(stream: Tensor, table: Tensor, bits: int) -> Tensor:
    """Returns [.., n] int64, each value's window."""
    L = window_bits(table)
    ones = (stream.long()[..., None] >> torch.arange(8) & 1).flatten(-2)
    values = torch.arange(ones.shape[-1] // bits)
    at = (values[:, None] * bits + torch.arange(L)) % ones.shape[-1]
    return (ones[..., at] << torch.arange(L)).sum(-1)


def nearest_windows(x: Tensor, table: Tensor, bits: int) -> Tensor:
    """Returns [N, n] int64, the ring's windows whose labels are nearest to x [N, n], in two passes."""
    return torch.cat([nearest_of_chunk(part, table, bits) for part in x.split(CHUNK)] or [x.long()])


def nearest_of_chunk(x: Tensor, table: Tensor, bits: int) -> Tensor:
    n = x.shape[1]
    reach = min(REACH.get(window_bits(table), 32), n // 2)
    around = torch.cat([x[:, n - reach :], x[:, :reach]], 1).t().contiguous()
    costs = forward(around, table, bits, None)
    _, joint = backward(costs, around, table, bits, costs[-1].argmin(0), first=reach)
    values = x.t().contiguous()
    costs = forward(values, table, bits, joint)
    result, _ = backward(costs, values, table, bits, joint)
    return result


def forward(x: Tensor, table: Tensor, bits: int, start: Tensor | None) -> Tensor:
    """Returns [n + 1, states, N], the least squared error of the values before each step, by the state after them.

    x is [n, N]. start is [N], the only state to begin in, or None for any.
    """
    steps, N = x.shape
    choices, states = 1 << bits, len(table) >> bits
    labels = table.view(choices, states, 1)  # by the new bits, then the shared ones
    costs = x.new_zeros(steps + 1, states, N)
    if start is not None:
        costs[0] = torch.inf
        costs[0].scatter_(0, start[None], 0.0)
    cost = x.new_empty(choices, states, N)
    for i in range(steps):
        torch.sub(labels, x[i], out=cost)
        cost.mul_(cost).add_(costs[i])
        torch.amin(cost.view(states, choices, N), 1, out=costs[i + 1])  # by the next state, then the bits it drops
    return costs


def backward(costs: Tensor, x: Tensor, table: Tensor, bits: int, end: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Returns the windows [N, n - first] of the values from `first` on, on the best paths to the states `end`, and the
    states [N] before them.
    """
    state, dropped = end, torch.arange(1 << bits)[:, None]
    result = []
    for i in range(len(x) - 1, first - 1, -1):
        windows = (state << bits) + dropped
        before = windows & (len(table) >> bits) - 1
        cost = costs[i].gather(0, before) + (table[windows] - x[i]) ** 2
        window = windows.gather(0, cost.argmin(0, keepdim=True))[0]
        result.append(window)
        state = window & (len(table) >> bits) - 1
    return torch.stack(result[::-1], 1), state
