"""Sizes of codecs for the tests of the AURA ops."""

from torch_gdn_check.registry.aura import BITS, HEAD_SIZES

# Each size has two numbers of bits, and each number of bits has two or three sizes.
CODECS = [(D, BITS[(i + shift) % 5]) for shift in (0, 2) for i, D in enumerate(HEAD_SIZES)]
