"""AURA: attention over a key-value cache that is held in 2 to 8 bits a value."""

from torch_gdn.aura import codebooks

__all__ = ["codebooks"]
