"""Which attention backend an engine gets: keys and values, or with additional_config={"aura": "8v4"} AURA's codes."""

from __future__ import annotations

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from torch_gdn_engines.vllm.attention import PagedBackend
from torch_gdn_engines.vllm.aura_attention import backend_of


def aura_scheme() -> str | None:
    config = get_current_vllm_config_or_none()
    additional = config.additional_config if config is not None else None
    return additional.get("aura") if isinstance(additional, dict) else None


def backend_path() -> str:
    scheme = aura_scheme()
    backend = PagedBackend if scheme is None else backend_of(scheme)
    return f"{backend.__module__}.{backend.__name__}"


def register() -> None:
    register_backend(AttentionBackendEnum.CUSTOM, f"{PagedBackend.__module__}.{PagedBackend.__name__}")
