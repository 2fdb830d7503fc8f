"""AURA's schemes as values of --kv-cache-dtype: aura_8v4 means the same as additional_config={"aura": "8v4"}.

vLLM accepts such names from version 0.33 on. It would take a registered name for a dtype of whole keys and values, so
the name is replaced before vLLM sizes anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from torch_gdn.aura.scheme import names
from torch_gdn_engines.vllm import versions

PREFIX = "aura_"


class Handler:
    """Answers what vLLM asks about a registered name while it checks its configuration, before the name is replaced."""

    name: str

    def torch_dtype(self) -> torch.dtype:
        return torch.uint8

    def quant_mode(self) -> Any:
        from vllm.v1.kv_cache_interface import KVQuantMode

        return KVQuantMode.NONE


def refuse_in_old_versions(arguments: Sequence[str]) -> None:
    """Exits if vLLM is 0.32, whose command line would call a name of ours an invalid choice."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--kv-cache-dtype", "--kv_cache_dtype", default="")
    value = parser.parse_known_args(list(arguments))[0].kv_cache_dtype
    if value.startswith(PREFIX) and versions.version_of_vllm().startswith("0.32."):
        option = f'--additional-config \'{{"aura": "{value.removeprefix(PREFIX)}"}}\''
        sys.exit(f"--kv-cache-dtype: expected one of vLLM 0.32's own names, got {value}: pass {option} instead")


def register() -> None:
    """Registers nothing for vLLM 0.32, which refuses names other than its own. It calls this before it parses."""
    from vllm.config import cache

    if not hasattr(cache, "register_kv_cache_dtype"):
        refuse_in_old_versions(sys.argv[1:])
        return
    for name in map(PREFIX.__add__, names()):
        if name not in cache.KV_CACHE_DTYPES:
            cache.register_kv_cache_dtype(name)(type("AuraHandler", (Handler,), {"name": name}))


def move_to_additional_config(vllm_config: Any) -> None:
    """Replaces a dtype of aura_8v4 by "auto" and by {"aura": "8v4"} in additional_config.

    Raises:
        ValueError: If additional_config names another scheme.
    """
    cache = vllm_config.cache_config
    if not str(cache.cache_dtype).startswith(PREFIX):
        return
    scheme = cache.cache_dtype.removeprefix(PREFIX)
    options = vllm_config.additional_config
    given = options.get("aura", scheme) if isinstance(options, dict) else scheme
    if given != scheme:
        raise ValueError(f"kv_cache_dtype: expected {PREFIX}{given} like additional_config, got {cache.cache_dtype}")
    vllm_config.additional_config = {**(options if isinstance(options, dict) else {}), "aura": scheme}
    cache.cache_dtype = "auto"
