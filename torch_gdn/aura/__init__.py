"""AURA: attention over a key-value cache that is held in 2 to 8 bits a value."""

from torch_gdn.aura import codebooks
from torch_gdn.aura.kv_cache import KVCache
from torch_gdn.aura.scheme import Scheme

__all__ = ["KVCache", "Scheme", "codebooks"]
