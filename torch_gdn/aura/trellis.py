"""A trellis code for normal values. A value's own bits and those of the values after it choose its label.

`torch_gdn.reference.trellis` says which bits. Tables are for values of variance 1, and odd: table[2^L - 1 - w] =
-table[w]. Their labels are whole numbers from -127 to 127 times a step, which loses no accuracy. docs/numerics.md says
what decoding a value costs. In a checkout, `evidence.lab.studies.trellis_training` trains the tables.
"""

import torch
from torch import Tensor

from torch_gdn.aura.tables import read, require
from torch_gdn.reference.trellis import nearest_windows, pack, window_bits, windows

__all__ = ["RATES", "decode", "encode", "table"]

RATES = {6: (2, 3, 4), 8: (2, 3, 4), 10: (5,)}  # bits per value, by the bits of a window
FILE = "trellis.json"


def table(window: int, bits: int) -> Tensor:
    """Returns the labels of a code's windows.

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
    result = read(FILE)[str(window)][str(bits)]
    return odd(torch.tensor(result["labels"]).float()) * result["step"]


def odd(half: Tensor) -> Tensor:
    """Returns the odd table whose first half is `half`."""
    return torch.cat([half, -half.flip(0)])


def encode(x: Tensor, table: Tensor, bits: int) -> Tensor:
    """Returns the streams whose decoded values are nearest to x.

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
    return pack(nearest_windows(flat, table, bits), bits).reshape(*x.shape[:-1], x.shape[-1] * bits // 8)


def decode(stream: Tensor, table: Tensor, bits: int) -> Tensor:
    """Returns the values of streams.

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
        >>> trellis.decode(stream, labels, 2)[7] == labels[0b000111]
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
