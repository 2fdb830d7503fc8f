"""Sizes of codecs for the tests of the AURA ops."""

from torch_gdn.testing.aura import BITS, HEAD_SIZES

# Each size with two numbers of bits, each number with three sizes.
CODECS = [(D, BITS[(i + shift) % 4]) for shift in (0, 2) for i, D in enumerate(HEAD_SIZES)]
