"""Drafts for calls of `generate` that do not ask for it: always, or wherever it pays.

A generation is cut into segments, of plain steps or of steps with drafts. They share a cache. The prediction layer also
sees the hidden states of the plain segments.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.generation import utils
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from torch_gdn.integrations.transformers import draft_choice, known_forms
from torch_gdn.integrations.transformers.draft_choice import DRAFTED, PLAIN, choice_of, keep
from torch_gdn.integrations.transformers.drafts import AUTO, Call, hearing, resumed, tokens_in_a_step, wanted
from torch_gdn.integrations.transformers.patches import Patch, rebind
from torch_gdn.integrations.transformers.prediction_layers import number_of_layers, prediction_model
from torch_gdn.integrations.transformers.rollback import stop_recording
from torch_gdn.integrations.transformers.versions import CACHE_NAMES

CONTROL = {"logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer", "tokenizer"}
KNOWN = CONTROL | {CACHE_NAMES.model, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}
without_layer: WeakSet[nn.Module] = WeakSet()
HEARD = 1024  # tokens of a prompt that the prediction layer sees later, if the prompt is in a plain segment


def segment_patches(modules: dict[str, ModuleType]) -> Iterator[Patch]:
    """Yields the patches. `modules` are those of the models that may be drafted for."""
    models = known_forms.models_of(modules)
    yield rebind(utils.GenerationMixin, "_sample", functools.partial(in_segments, models))


class Stopwatch(BaseStreamer):
    """Passes tokens on as plain steps give them, and times them, but for the first steps, which prepare a segment."""

    def __init__(self, streamer: Any, untimed: int = 0) -> None:
        self.streamer, self.untimed = streamer, untimed
        self.start = self.last = 0.0
        self.tokens = 0

    def put(self, value: Tensor) -> None:
        self.last = draft_choice.clock()
        if self.untimed:
            self.untimed -= 1
            self.start = self.last
        else:
            self.tokens += value.numel()
        if self.streamer is not None:
            self.streamer.put(value.flatten())

    def end(self) -> None:
        """Ends nothing, because a segment is not the whole text."""


def in_segments(
    models: tuple[type, ...], original: Callable[..., Any], model: Any, input_ids: Tensor, **options: Any
) -> Any:
    drafts = wanted.get("drafts")
    if drafts is None or not isinstance(model, models) or not may_draft(model, input_ids, options):
        return original(model, input_ids, **options)
    whole = Generation(model, original, options, tokens_in_a_step())
    if drafts == AUTO:
        result = whole.run(input_ids)
    else:
        result = whole.segment(input_ids, DRAFTED, whole.end, Stopwatch(whole.streamer))
    if whole.streamer is not None:
        whole.streamer.end()
    return result


def may_draft(model: Any, input_ids: Tensor, options: dict[str, Any]) -> bool:
    """Returns whether a plain call may have drafts: one text without images, from a cache that can go back."""
    config = options["generation_config"]
    others = [name for name, value in options.items() if name not in KNOWN and value is not None]
    return (
        not others
        and not options.get("synced_gpus")
        and input_ids.shape[0] == 1
        and not (config.return_dict_in_generate or config.is_assistant or config.prefill_chunk_size)
        and type(options.get(CACHE_NAMES.model)) is DynamicCache
        and number_of_layers(model) == 1
        and has_layer(model)
    )


def has_layer(model: Any) -> bool:
    """Returns whether the model's files have the layer that its configuration promises. If not, it warns once."""
    if model not in without_layer:
        try:
            prediction_model(model)
            return True
        except (OSError, RuntimeError, ValueError) as error:  # of reading files
            warnings.warn(f"torch_gdn: no drafts for {type(model).__name__}: {error}", stacklevel=2)
            without_layer.add(model)
    return False


class Generation:
    """One call of `generate` in segments."""

    def __init__(self, model: Any, plain: Callable[..., Any], options: dict[str, Any], drafts: int) -> None:
        self.model, self.plain, self.options = model, plain, options
        self.config = copy.copy(options["generation_config"])
        self.config.use_mtp = True
        self.end = self.config.max_length
        self.cache = options[CACHE_NAMES.model]
        self.streamer = options.get("streamer")
        self.call = Call(drafts)

    def run(self, text: Tensor) -> Tensor:
        """Returns the whole text, of segments that `draft_choice` chooses."""
        choice = choice_of(self.model.config.name_or_path, self.model.device)
        # transformers then ends a plain segment before it computes a token more than it returns.
        self.cache._is_user_defined = True
        while True:
            way, tokens = choice.next_segment()
            limit = min(text.shape[1] + tokens, self.end)
            watch = Stopwatch(self.streamer, 2 if way == DRAFTED else 1)
            before, counts = text.shape[1], self.counts()
            text = self.segment(text, way, limit, watch)
            drafts = [now - then for now, then in zip(self.counts(), counts, strict=True)]
            if choice.add(way, text.shape[1] - before, watch.tokens, watch.last - watch.start, *drafts):
                keep(self.model.config.name_or_path, self.model.device)
            if text.shape[1] >= self.end or bool(self.options["stopping_criteria"](text, None).all()):
                return text

    def counts(self) -> tuple[int, int]:
        return (0, 0) if self.call.layer is None else (self.call.layer.proposed, self.call.layer.accepted)

    def segment(self, text: Tensor, way: str, limit: int, streamer: Any) -> Tensor:
        """Returns the text after a segment. Drafts may make it longer than `limit`, but for the end."""
        self.config._mask_length = text.shape[1]
        criteria = StoppingCriteriaList([*self.options["stopping_criteria"], MaxLengthCriteria(limit)])
        own = {"streamer": streamer, "generation_config": self.config, "stopping_criteria": criteria}
        options = self.options | continued(self.options, text) | own
        if way == PLAIN:
            with hearing(self.model, self.call.heard, HEARD):
                result: Tensor = self.plain(self.model, text, **options)
            return result
        token = resumed.set(self.call)
        try:
            result = type(self.model)._assisted_decoding(self.model, text, **options)
        finally:
            resumed.reset(token)
        stop_recording(self.cache)
        return result


def continued(options: dict[str, Any], text: Tensor) -> dict[str, Any]:
    """Returns the mask and the positions for a text that has grown."""
    result: dict[str, Any] = {}
    if (mask := options.get("attention_mask")) is not None:
        more = text.shape[1] - mask.shape[-1]
        result["attention_mask"] = torch.cat([mask, mask.new_ones(1, more)], 1)
    if (positions := options.get("position_ids")) is not None:
        more = torch.arange(1, text.shape[1] - positions.shape[-1] + 1, device=positions.device)
        result["position_ids"] = torch.cat([positions, positions[..., -1:] + more], -1)
    return result
