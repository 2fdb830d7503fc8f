"""Loads a quantised checkpoint into vLLM's models on mps. Embeddings and heads are packed if the files have them so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from torch_gdn_engines.vllm.quantized_layers import PackedLinearMethod


class PackedLoader(DefaultModelLoader):
    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def configuration(self, model_config: Any) -> Any:
        """Returns the configuration anew, by the files' names. It is None for a drafter that is not quantised."""
        return VllmConfig.get_quantization_config(model_config, self.load_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        config = self.configuration(model_config)
        if config is not None:
            if (mapper := getattr(model, "hf_to_vllm_mapper", None)) is not None:
                config.apply_vllm_mapper(mapper.get_rename_mapper())
            pack_embeddings(model, config)
        super().load_weights(model, model_config)


def pack_embeddings(model: Any, config: Any) -> None:
    """Packs embedding and head, which vLLM makes for some models without the configuration. A head may be tied."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, VocabParallelEmbedding)}
    for name, layer in layers.items():
        if model.get_submodule(name) is not layer or isinstance(layer.quant_method, PackedLinearMethod):
            continue
        method = config.get_quant_method(layer, name)
        if not isinstance(method, PackedLinearMethod):
            continue
        plain = layer.weight
        del layer.weight
        layer.quant_method = method
        with plain.device:
            method.create_weights(
                layer,
                layer.input_size_per_partition,
                layer.output_partition_sizes,
                layer.input_size,
                layer.output_size,
                layer.params_dtype,
                weight_loader=layer.weight_loader,
            )
        for other, head in layers.items():
            if getattr(head, "weight", None) is plain:
                owner, _, attribute = other.rpartition(".")
                setattr(model.get_submodule(owner), attribute, layer)
