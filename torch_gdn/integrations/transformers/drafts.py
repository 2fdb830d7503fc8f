"""Enables drafts from prediction layers, in a cache that may hold tokens already, and with any stopping criterion.

transformers' assisted generation begins with an empty cache, and looks for a stop string only behind the last accepted
token. Here the first step computes what the cache lacks, and accepted drafts end with the first token that stops.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_layers
from transformers.generation import utils
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from torch_gdn.integrations.transformers import known_forms
from torch_gdn.integrations.transformers.patches import Patch, rebind
from torch_gdn.integrations.transformers.prediction_layers import PredictionDrafts, number_of_layers, with_quantizer
from torch_gdn.integrations.transformers.versions import CACHE_NAMES

AUTO = "auto"
IMAGES = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")  # arguments of a model
HANDLED = (EosTokenCriteria, MaxLengthCriteria)  # transformers itself ends accepted drafts there


@dataclass
class Call:
    """One call of assisted generation."""

    drafts: int  # of the prediction layer in a step
    criteria: list[Any] = field(default_factory=list)  # those that may stop it within a draft
    cache: Any = None
    cached: int = 0  # tokens in it before the first step
    heard: list[Tensor] = field(default_factory=list)  # hidden states that the prediction layer has not seen
    layer: PredictionDrafts | None = None

    def stops(self, text: Tensor) -> bool:
        return any(bool(each(text, None).all()) for each in self.criteria)

    def ended(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Returns the following tokens up to the first one that stops, or all."""
        for n in range(1, following.shape[1]):
            if self.stops(torch.cat([tokens, following[:, :n]], 1)):
                return following[:, :n]
        return following


wanted: dict[str, int | str] = {}  # "drafts": AUTO, or tokens in a step; empty unless `enable` was asked for drafts
current: ContextVar[Call | None] = ContextVar("torch_gdn_drafts", default=None)
resumed: ContextVar[Call | None] = ContextVar("torch_gdn_resumed_drafts", default=None)  # the same in each segment


def draft_patches(modules: dict[str, ModuleType]) -> Iterator[Patch]:
    """Yields the patches. `modules` are those of the models that may be drafted for."""
    models = known_forms.models_of(modules)
    mixin = utils.GenerationMixin
    yield rebind(mixin, "_assisted_decoding", functools.partial(in_a_call, models))
    yield rebind(mixin, "_get_candidate_generator", candidate_generator)
    yield rebind(mixin, "prepare_inputs_for_generation", behind_the_cached)
    yield rebind(utils, "_speculative_sampling", ended_sample)
    yield rebind(modeling_layers, "convert_and_load_state_dict_in_model", with_quantizer)


def in_a_call(
    models: tuple[type, ...], original: Callable[..., Any], model: Any, input_ids: Tensor, **options: Any
) -> Any:
    if not isinstance(model, models):
        return original(model, input_ids, **options)
    cache = options.get(CACHE_NAMES.model)
    call = resumed.get() or Call(tokens_in_a_step())
    call.criteria = [each for each in options["stopping_criteria"] if type(each) not in HANDLED]
    call.cache = cache
    call.cached = 0 if cache is None else cache.get_seq_length()
    heard = call.heard if options["generation_config"].use_mtp else None
    token = current.set(call)
    try:
        with hearing(model, heard):
            return original(model, input_ids, **options)
    finally:
        current.reset(token)


def tokens_in_a_step() -> int:
    """Returns how many tokens the prediction layer proposes in a step."""
    drafts = wanted.get("drafts", 1)
    return drafts if isinstance(drafts, int) else 1


@contextmanager
def hearing(model: Any, heard: list[Tensor] | None, most: int | None = None) -> Iterator[None]:
    """Keeps the last hidden states of what the model runs, but no more tokens of one call than `most`."""
    if heard is None:
        yield
        return

    def hear(_: Any, __: Any, output: Any) -> None:
        hidden = output.last_hidden_state
        if most is not None and hidden.shape[1] > most:
            heard.clear()
            hidden = hidden[:, -most:].clone()
        heard.append(hidden)

    handle = model.get_decoder().register_forward_hook(hear)
    try:
        yield
    finally:
        handle.remove()


def candidate_generator(original: Callable[..., Any], model: Any, generation_config: Any, **options: Any) -> Any:
    """Takes the prediction layer's own generator, and ends the drafts of every generator before what stops them.

    If drafts are sampled, where they end must not depend on them: `ended_sample` then ends what is accepted.
    """
    call = current.get()
    if call is None:
        return original(model, generation_config=generation_config, **options)
    others = (generation_config.assistant_early_exit, generation_config.prompt_lookup_num_tokens)
    result: Any
    if generation_config.use_mtp and others == (None, None) and number_of_layers(model) == 1:
        if call.layer is None:
            call.layer = PredictionDrafts(
                model, generation_config, options["logits_processor"], call.heard, call.drafts
            )
        result = call.layer
    else:
        result = original(model, generation_config=generation_config, **options)
    ending = replace(call, criteria=[*call.criteria, *before_images(model, options["model_kwargs"])])
    if ending.criteria and "get_candidates" not in vars(result):
        get_candidates = result.get_candidates

        def before_the_end(input_ids: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
            text, logits = get_candidates(input_ids, **given)
            drafts = text[:, input_ids.shape[1] :]
            if (generation_config.do_sample and logits is not None) or not drafts.numel():
                return text, logits
            ended = ending.ended(input_ids, drafts)
            if ended.shape == drafts.shape and not ending.stops(text):
                return text, logits
            stay = ended.shape[1] - 1
            return text[:, : input_ids.shape[1] + stay], None if logits is None or not stay else logits[:, :stay]

        result.get_candidates = before_the_end
    return result


def before_images(model: Any, given: dict[str, Any]) -> Iterator[Callable[..., Tensor]]:
    """Yields a criterion for drafts in a call with images: the model expects as many of their tokens as it gets."""
    if any(given.get(name) is not None for name in IMAGES):
        names = ("image_token_id", "video_token_id")
        tokens = torch.tensor([getattr(model.config, name, None) or -1 for name in names], device=model.device)
        yield lambda text, _: torch.isin(text[:, -1], tokens)


def behind_the_cached(
    original: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    next_sequence_length: int | None = None,
    *args: Any,
    **options: Any,
) -> Any:
    call = current.get()
    if call is not None and call.cached and options.get("is_first_iteration") and next_sequence_length is None:
        next_sequence_length = input_ids.shape[1] - call.cached
    return original(model, input_ids, next_sequence_length, *args, **options)


def ended_sample(
    original: Callable[..., Any],
    candidate_input_ids: Tensor,
    candidate_logits: Tensor,
    candidate_length: int,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, Any]:
    accepted, matches = original(candidate_input_ids, candidate_logits, candidate_length, *args, **options)
    call = current.get()
    if call is not None and call.criteria:
        accepted = call.ended(candidate_input_ids[:, :-candidate_length], accepted)
    return accepted, matches
