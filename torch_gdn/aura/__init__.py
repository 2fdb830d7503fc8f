"""AURA: attention to a key-value cache that holds each value in 2 to 8 bits."""

from torch_gdn.aura import codebooks
from torch_gdn.aura.kv_cache import KVCache
from torch_gdn.aura.scheme import Scheme

__all__ = ["KVCache", "Scheme", "codebooks"]
