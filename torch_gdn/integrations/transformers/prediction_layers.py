"""Drafts tokens with the prediction layer (MTP) that a model's files have.

transformers reads such layers if the configuration names them as its own classes do. Qwen's hybrids name them
otherwise. Here the layer is read once for each model, and not in each call. It shares the model's embedding and head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import modeling_layers
from transformers.cache_utils import MtpCache
from transformers.core_model_loading import WeightRenaming
from transformers.generation.candidate_generator import MTPCandidateGenerator

from torch_gdn.integrations.transformers.packed_quantizer import PackedQuantizer
from torch_gdn.quantized.formats import shapes_in

# The number of layers in a configuration: transformers' name, Qwen3.5's, and DeepSeek's.
NAMES = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
ONE_LAYER = r"^mtp.*"  # the tensors of models whose configuration has no number, as Qwen3-Next's

loaded: WeakKeyDictionary[nn.Module, tuple[Any, MtpModel]] = WeakKeyDictionary()  # by model: for which place, layers


def prediction_model(model: Any) -> MtpModel:
    """Returns the prediction layers of a model on its last layer's device. They are read when first asked for.

    Raises:
        ValueError: If the model does not come from files.
        RuntimeError: If the files lack their tensors.
    """
    if not model.config.name_or_path:
        raise ValueError("generate: use_mtp: expected a model from from_pretrained, whose files have the layer")
    device = next(model.get_decoder().layers[-1].parameters()).device
    place, result = loaded.get(model, (None, None))
    if result is None or place != (device, model.dtype):
        new: MtpModel = MtpModel.from_pretrained(Configured(model), device_map={"": device}).eval()
        result = new
        loaded[model] = (device, model.dtype), result
        result.requires_grad_(False)
    result.tie_with_main_model(model)
    return result


class MtpModel(modeling_layers.MtpModel):
    """Prediction layers whose weights stay packed if those of the model do."""

    quantizer: PackedQuantizer | None = None

    @classmethod
    def is_custom_code(cls) -> bool:
        """Returns False, so that transformers renames the tensors as for its own class of this name."""
        return False

    def get_weight_conversions(self, main_model: Any) -> list[Any]:
        result: list[Any] = super().get_weight_conversions(main_model)
        result.append(WeightRenaming(r"\.mtp_block\.final_layernorm\.", ".post_norm."))  # Bailing-Hybrid's name
        quantizer = getattr(main_model, "hf_quantizer", None)
        if isinstance(quantizer, PackedQuantizer):
            self.quantizer = quantizer
            own = self.get_mtp_weights_regex(main_model)
            shapes = {name: shape for name, shape in shapes_in(quantizer.files).items() if own.search(name)}
            quantizer.replace_all(self, shapes, result)
        return result


def with_quantizer(
    original: Callable[..., Any], model: Any, state_dict: Any, load_config: Any, *args: Any, **options: Any
) -> Any:
    """Loads prediction layers with the quantizer of the model, which transformers leaves out."""
    if isinstance(model, MtpModel):
        load_config = replace(load_config, hf_quantizer=model.quantizer)
    return original(model, state_dict, load_config, *args, **options)


class Configured:
    """A model with a configuration that says what its prediction layers are. The model's own stays as it is."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = copy.deepcopy(model.config)
        self.config.dtype = model.dtype
        text = self.config.get_text_config(decoder=True)
        text.num_mtp_layers = number_of_layers(model)
        if getattr(text, "layer_types", None) is not None and getattr(text, "mtp_layer_types", None) is None:
            text.mtp_layer_types = ["full_attention"] * text.num_mtp_layers
        blocks = getattr(text, "mlp_layer_types", None)
        if blocks is not None and getattr(text, "mtp_mlp_layer_types", None) is None:
            text.mtp_mlp_layer_types = blocks[-1:] * text.num_mtp_layers  # those of the last layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def number_of_layers(model: Any) -> int:
    """Returns how many prediction layers the model's configuration promises."""
    config = model.config.get_text_config(decoder=True)
    for name in NAMES:
        if (number := getattr(config, name, None)) is not None:
            return int(number)
    return int(ONE_LAYER in (model._keys_to_ignore_on_load_unexpected or ()))


class PredictionDrafts(MTPCandidateGenerator):
    """Proposes the tokens that a prediction layer predicts, each from the layer's hidden state of the one before.

    `heard` has the last hidden states of the model's tokens as they come: those that the layer has not seen yet.
    """

    model_kwargs_overrides: dict[str, Any] = {}  # noqa: RUF012  # not `output_hidden_states`, which adds hooks to layers

    def __init__(
        self, model: Any, generation_config: Any, logits_processor: Any, heard: list[Tensor], drafts: int = 1
    ) -> None:
        self.mtp_model = prediction_model(model)
        self.device = next(self.mtp_model.layers.parameters()).device
        self.drafts = drafts
        self.max_length = generation_config.max_length
        self.do_sample = generation_config.do_sample
        self.logits_processor = logits_processor
        self.heard = heard
        self.mtp_cache = MtpCache(config=self.mtp_model.config)
        self.mtp_cache.activate_past_recording()
        self.proposed = self.accepted = 0

    def get_candidates(
        self, input_ids: Tensor, model_kwargs: dict[str, Any], **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        drafts = min(self.drafts, self.max_length - input_ids.shape[1] - 1)
        if not self.heard or drafts < 1:
            return input_ids, None
        hidden = torch.cat(self.heard, 1) if len(self.heard) > 1 else self.heard[0]
        self.heard.clear()
        tokens, logits = self.draft(input_ids, hidden, positions_of(model_kwargs, input_ids), drafts)
        return torch.cat([input_ids, tokens], 1), logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Forgets the hidden states of rejected drafts."""
        drafts = scores.shape[1] - 1
        self.proposed, self.accepted = self.proposed + drafts, self.accepted + num_matches
        self.heard[-1] = self.heard[-1][:, : self.heard[-1].shape[1] - (drafts - num_matches)]

    def draft(self, input_ids: Tensor, hidden: Tensor, positions: Tensor, drafts: int) -> tuple[Tensor, Tensor]:
        """Returns tokens [1, drafts] and the logits that chose them, [1, drafts, vocabulary]."""
        new, text, result = hidden.shape[1], input_ids, []
        tokens, positions, hidden = input_ids[:, -new:], positions[:, -new:], hidden.to(self.device)
        for _ in range(drafts):
            hidden = self.mtp_model.forward_layer(0, hidden, positions, self.mtp_cache, input_ids=tokens)
            logits = self.mtp_model._project_to_logits(hidden[:, -1:])[:, -1].to(input_ids.device, torch.float32)
            if self.logits_processor is not None:
                logits = self.logits_processor(text, logits)
            token = logits.softmax(-1).multinomial(1) if self.do_sample else logits.argmax(-1, keepdim=True)
            text = torch.cat([text, token], 1)
            result.append(logits)
            hidden, tokens, positions = hidden[:, -1:], token, positions[:, -1:] + 1
        if drafts > 1:  # the keys of drafts do not come from the model's own hidden states
            self.mtp_cache.crop(1 - drafts)
        return text[:, input_ids.shape[1] :], torch.stack(result, 1)


def positions_of(model_kwargs: dict[str, Any], input_ids: Tensor) -> Tensor:
    """Returns the tokens' positions in the text, [1, T]. A model of images and text has them in its first row."""
    positions: Tensor | None = model_kwargs.get("position_ids")
    if positions is None:
        return torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    return positions[0] if positions.dim() == 3 else positions
