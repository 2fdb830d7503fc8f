"""The file of an AuraCache, a safetensors file: version 3.

Metadata: format "torch_gdn.aura.cache", version "3", scheme, table, tail and sinks (as in `torch_gdn.aura.file`, for
layers that are held as codes), and layers, a list in JSON with a kind for each layer. A window has no sinks, and each
layer has its own seed. Tensors are named "<layer>.<name>". A layer of codes has the tensors of a KVCache's file. Other
layers have keys and values, or columns and state. Older versions, which are still read, are those of a KVCache's file.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_gdn.aura import file
from torch_gdn.aura.kv_cache import KVCache
from torch_gdn.aura.scheme import Scheme
from torch_gdn.integrations.transformers.aura_layers import AuraLayer, Options, WindowLayer, head_size, layer_config

FORMAT = "torch_gdn.aura.cache"


@dataclass(frozen=True)
class Content:
    options: Options
    layers: list[dict[str, Any]]
    tensors: dict[str, Tensor]

    def layer_tensors(self, index: int) -> dict[str, Tensor]:
        prefix = f"{index}."
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}

    def fill(self, layers: Sequence[Any], device: torch.device) -> None:
        """Makes these new layers what was saved."""
        file.require(len(self.layers) == len(layers), f"{len(layers)} layers, as the model has", len(self.layers))
        for index, (layer, saved) in enumerate(zip(layers, self.layers, strict=True)):
            try:
                fill(layer, saved, self.layer_tensors(index), device)
            except ValueError as error:
                raise ValueError(f"layer {index}: {error}") from None


def kind_of(layer: Any) -> str:
    if isinstance(layer, WindowLayer):
        return f"codes, window {layer.window}"
    return "codes" if isinstance(layer, AuraLayer) else type(layer).__name__


def fill(layer: Any, saved: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> None:
    file.require(saved["kind"] == kind_of(layer), f"{kind_of(layer)}, as the model has", saved["kind"])
    if not saved["tokens"]:
        return
    if isinstance(layer, AuraLayer):
        fill_codes(layer, file.described(saved["codes"], tensors), device)
        if isinstance(layer, WindowLayer):
            layer.seen = saved["tokens"]
        return
    from torch_gdn.integrations.transformers.cache_pieces import restore_layer

    names = {"columns", "state"} if "columns" in tensors else {"keys", "values"}
    file.require(set(tensors) == names, " and ".join(sorted(names)), sorted(tensors))
    restore_layer(layer, [{name: x.to(device) for name, x in tensors.items()}], saved["tokens"])


def fill_codes(layer: AuraLayer, content: file.Content, device: torch.device) -> None:
    config = layer_config(layer.config, layer.index)
    heads, size = config.num_key_value_heads, head_size(config)
    _, found_heads, _, found_size = content.shape
    expected = f"{heads} heads of keys of size {size}, as the model has"
    file.require((found_heads, found_size) == (heads, size), expected, f"{found_heads} of size {found_size}")
    layer.cache = KVCache.of(content, device, max(layer.capacity, content.tokens))
    layer.is_initialized = True


def write(path: str | os.PathLike[str], layers: Sequence[Any]) -> None:
    from safetensors.torch import save_file

    from torch_gdn.integrations.transformers.cache_pieces import extract_piece

    tensors: dict[str, Tensor] = {}
    told: list[dict[str, Any]] = []
    coded = [layer.options for layer in layers if isinstance(layer, AuraLayer)]
    scheme, tail, _ = coded[0]
    sinks = max(options.sinks for options in coded)  # windows have none
    for index, layer in enumerate(layers):
        entry: dict[str, Any] = {"kind": kind_of(layer), "tokens": tokens_of(layer)}
        parts: dict[str, Tensor] = {}
        if isinstance(layer, AuraLayer) and layer.cache is not None:
            content = layer.cache.content()
            entry["codes"], parts = file.description(content), content.tensors
        elif entry["tokens"]:
            parts = extract_piece(layer, 0, entry["tokens"])
        tensors |= {f"{index}.{name}": x.cpu().contiguous() for name, x in parts.items()}
        told.append(entry)
    about = {"scheme": scheme.name, "table": scheme.table, "layers": json.dumps(told)}
    about |= {"tail": str(tail), "sinks": str(sinks)}
    save_file(tensors, path, {"format": FORMAT, "version": file.VERSIONS[-1]} | about)


def tokens_of(layer: Any) -> int:
    """Returns a layer's tokens. States count no tokens, so for these it returns whether there are any."""
    if not hasattr(layer, "conv_states"):
        return int(layer.get_seq_length())
    if not isinstance(layer.has_previous_state, dict):
        raise ValueError("save: layers: expected states as transformers keeps them since 5.16, got an older one's")
    return int(any(layer.has_previous_state.values()))


def read(path: str | os.PathLike[str]) -> Content:
    metadata, tensors = file.opened(path, FORMAT)
    try:
        layers = json.loads(metadata["layers"])
    except (KeyError, ValueError):
        raise ValueError(f"load: path: expected a list of layers, got {metadata.get('layers')!r}") from None
    scheme = Scheme(metadata.get("scheme", ""), metadata.get("table", ""))
    return Content(Options(scheme, *file.exact_sizes(metadata)), layers, tensors)
