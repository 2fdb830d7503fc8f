"""Tests drafts from prediction layers: tokens and logits equal those without drafts, whatever is accepted."""

from __future__ import annotations

import functools
import itertools
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.devices import kernels_run, profiled, ready
from tests.integrations.drafted import ADDING, Steps, add_layer, files, loaded, written
from tests.integrations.models import distance, random_model, random_tokens
from tests.integrations.quantized_files import FORMATS, write
from tests.integrations.serving import GREEDY_TOKENS, greedy, other_version
from tests.integrations.test_transformers import BAR
from torch_gdn.integrations import transformers
from torch_gdn.integrations.transformers.versions import with_cache

if reason := other_version("rollback"):
    pytest.skip(reason, allow_module_level=True)
from transformers import DynamicCache

from torch_gdn.integrations.transformers import drafts
from torch_gdn.integrations.transformers.drafts import Call, current
from torch_gdn.integrations.transformers.packed_layers import packed_layers
from torch_gdn.integrations.transformers.prediction_layers import PredictionDrafts, prediction_model

pytestmark = pytest.mark.usefixtures("serving")
KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
PROMPT = 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that gives the files of a model."""
    made: dict[tuple[str, str], Path] = {}

    def folder(kind: str = "qwen3_5", right: str = "always") -> Path:
        if (kind, right) not in made:
            made[kind, right] = files(tmp_path_factory.mktemp(f"{kind}-{right}"), kind, right)
        return made[kind, right]

    return folder


def assert_same(folder: Path, device: str | torch.device = "cpu", prompt: int = PROMPT, **options: Any) -> int:
    """Compares with transformers' greedy decoding. Returns the number of the model's steps."""
    transformers.disable()
    tokens, logits = greedy(loaded(folder), random_tokens(1, prompt), **options)
    transformers.enable(rollback=True)
    model = loaded(folder).to(device)
    steps = Steps(model)
    result, found_logits = greedy(model, random_tokens(1, prompt), use_mtp=True, **options)
    assert result == tokens
    assert distance(found_logits, logits) < BAR
    assert transformers.status().fallbacks == {}
    return steps.taken


@pytest.mark.sweep(4)
@pytest.mark.parametrize("right", ["always", "sometimes", "never"])
@pytest.mark.parametrize("kind", [*KINDS, "bailing_hybrid"])
def test_tokens_are_those_without_drafts(folders: Any, kind: str, right: str) -> None:
    steps = assert_same(folders(kind, right))
    most, fewest = GREEDY_TOKENS, 1 + -(-(GREEDY_TOKENS - 1) // 2)
    expected = {"always": steps == fewest, "sometimes": fewest < steps < most, "never": steps == most}
    assert expected[right], steps


def note_text(texts: list[Any], model: Any, _: Any, given: dict[str, Any]) -> None:
    texts.append(given["input_ids"].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_transformers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own generator takes the layer too, if the configuration has its names."""
    transformers.enable(rollback=True)
    folder = written(tmp_path, kind, scale=0.1, sign=1.0, block=5.0)
    verified: list[list[Any]] = [[], []]
    for layers, texts in enumerate(verified, 1):
        monkeypatch.setattr(drafts, "number_of_layers", lambda _, layers=layers: layers)
        model = loaded(folder)
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
        model.register_forward_pre_hook(functools.partial(note_text, texts), with_kwargs=True)
        greedy(model, random_tokens(1, PROMPT), use_mtp=True)
        texts.pop()  # transformers drafts for the last token too
    assert verified[0] == verified[1]
    assert 10 < len(verified[0]) < GREEDY_TOKENS - 1


def test_the_first_draft_does_not_depend_on_how_many_follow(tmp_path: Path) -> None:
    model = loaded(written(tmp_path, "qwen3_5", scale=0.1, sign=1.0, block=5.0))
    model.generation_config.max_length = 100
    few, many = (PredictionDrafts(model, model.generation_config, None, [], each) for each in (1, 3))
    tokens, hidden = random_tokens(1, 14), torch.randn(1, 13, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(14)[None]
    for start, end in ((0, 9), (9, 10), (10, 13)):
        given = tokens[:, : end + 1], hidden[:, start:end], positions[:, : end + 1]
        torch.testing.assert_close(many.draft(*given, 3)[1][:, :1], few.draft(*given, 1)[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, "bailing_hybrid"])
def test_on_mps(folders: Any, kind: str) -> None:
    device = ready("mps")
    with kernels_run(device, "fused_recurrent_gated_delta_rule", "causal_conv1d"):
        assert assert_same(folders(kind, "sometimes"), device) < GREEDY_TOKENS


@pytest.mark.parametrize("prompt", [1, 2, 61, 62, 63, 64])
def test_rejected_drafts_at_a_chunk_boundary(folders: Any, prompt: int) -> None:
    assert_same(folders("qwen3_5", "sometimes"), prompt=prompt)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_the_last_token_may_lie_within_a_draft(folders: Any, tokens: int) -> None:
    transformers.enable(rollback=True)
    model, prompt = loaded(folders()), random_tokens(1, PROMPT)
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": tokens}
    expected = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, use_mtp=True, **options), expected)
    assert expected.shape[1] == PROMPT + tokens


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_eos_within_a_draft(folders: Any, place: int) -> None:
    transformers.enable(rollback=True)
    model, prompt = loaded(folders()), random_tokens(1, PROMPT)
    tokens = greedy(model, prompt)[0]
    end = tokens[place]
    assert greedy(model, prompt, use_mtp=True, eos_token_id=end)[0] == tokens[: tokens.index(end) + 1]


def stop_at(end: int) -> Any:
    """Returns criteria that look at the last token only, as stop strings do."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Stop(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
            return input_ids[:, -1] == end

    return StoppingCriteriaList([Stop()])


@pytest.mark.parametrize("options", [{"use_mtp": True}, {"prompt_lookup_num_tokens": 4}], ids=["layer", "lookup"])
@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_a_criterion_within_a_draft(folders: Any, place: int, options: dict[str, Any]) -> None:
    transformers.enable(rollback=True)
    model, prompt = loaded(folders()), random_tokens(1, PROMPT)
    tokens = greedy(model, prompt)[0]
    end = tokens[place]
    prompt, start = torch.cat([prompt, torch.tensor([tokens + tokens[:1]])], 1), 1
    tokens = greedy(model, prompt)[0]
    end = tokens[start + place]
    expected = tokens[: tokens.index(end) + 1]
    assert greedy(model, prompt, stopping_criteria=stop_at(end), **options)[0] == expected


@pytest.mark.parametrize("seed", range(8))
def test_a_criterion_within_a_sampled_draft(folders: Any, seed: int) -> None:
    transformers.enable(rollback=True)
    model, prompt = loaded(folders()), random_tokens(1, PROMPT)
    torch.manual_seed(seed)
    options = {"do_sample": True, "top_k": 3, "use_mtp": True, "pad_token_id": 0, "max_new_tokens": 40}
    end = int(model.generate(prompt, **options)[0, PROMPT + 1])
    torch.manual_seed(seed)
    new = model.generate(prompt, stopping_criteria=stop_at(end), **options)[0, PROMPT:].tolist()
    assert new.index(end) == len(new) - 1


def test_stop_strings(folders: Any) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    transformers.enable(rollback=True)
    model, prompt = loaded(folders()), random_tokens(1, PROMPT)
    letters = string.ascii_letters + string.digits + "!?"
    words = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokens = greedy(model, prompt)[0]
    given = {"stop_strings": [letters[tokens[1]]], "tokenizer": tokenizer}
    assert greedy(model, prompt, use_mtp=True, **given)[0] == tokens[: tokens.index(tokens[1]) + 1]


def test_a_streamer_gets_each_token_once(folders: Any) -> None:
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):  # type: ignore[misc]
        tokens: list[int] = []  # noqa: RUF012

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    transformers.enable(rollback=True)
    model, prompt = loaded(folders("qwen3_5", "sometimes")), random_tokens(1, PROMPT)
    tokens = model.generate(prompt, use_mtp=True, do_sample=False, max_new_tokens=9, streamer=Streamer())
    assert Streamer.tokens == [*tokens[0].tolist(), -1]


def test_several_rows_are_refused_as_by_transformers(folders: Any) -> None:
    transformers.enable(rollback=True)
    with pytest.raises(ValueError, match="only supported for batch_size = 1"):
        loaded(folders()).generate(random_tokens(2, 9), use_mtp=True, max_new_tokens=2)


def test_an_aura_cache(tmp_path: Path) -> None:
    """Codes of the prompt do not change when drafts are taken back."""
    from torch_gdn.integrations.transformers.aura import AuraCache

    transformers.enable(rollback=True)
    model, prompt = loaded(files(tmp_path, "qwen3_5", "sometimes", head_dim=64)), random_tokens(1, 70)
    result = [
        greedy(model, prompt, **with_cache(AuraCache(model.config, tail=32)), **options)
        for options in ({}, {"use_mtp": True})
    ]
    assert result[0][0] == result[1][0]
    assert distance(result[1][1], result[0][1]) < BAR


def test_the_embedding_and_the_head_are_the_models(folders: Any) -> None:
    model = loaded(folders())
    layers = prediction_model(model)
    assert layers.embed_tokens.weight is model.model.embed_tokens.weight
    assert layers.shared_head.weight is model.lm_head.weight
    assert prediction_model(model) is layers
    assert not hasattr(model.config, "num_mtp_layers")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_packed_weights(kind: str, tmp_path: Path) -> None:
    """The file leaves the prediction layer as it is, and the head that it shares with the model too."""
    device = ready("mps")
    transformers.enable(rollback=True)
    model = random_model(kind, intermediate_size=64)
    for name, weight in model.named_parameters():
        if name.endswith(ADDING):
            weight.data *= 0.1
    write(model, tmp_path, "w4a16")
    add_layer(tmp_path, model)
    packed = loaded(tmp_path, device_map=str(device))
    assert transformers.status().packed
    steps = Steps(packed)
    tokens, logits = greedy(packed, random_tokens(1, PROMPT))
    result, found_logits = greedy(packed, random_tokens(1, PROMPT), use_mtp=True)
    assert result == tokens
    assert distance(found_logits, logits) < BAR
    assert steps.taken < 2 * GREEDY_TOKENS


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("kind", "form"),
    [*(("qwen3_5", form) for form in FORMATS), *(("qwen3_next", form) for form in FORMATS if form != "act-order")],
)
def test_a_packed_prediction_layer(kind: str, form: str, tmp_path: Path) -> None:
    """It is a copy of the last layer, packed as the file has that one."""
    device = ready("mps")
    transformers.enable(rollback=True)
    (dense_files := tmp_path / "dense").mkdir()
    model = random_model(kind, intermediate_size=64)
    write(model, tmp_path, form).save_pretrained(dense_files)
    for folder in (tmp_path, dense_files):
        tensors = load_file(folder / "model.safetensors")
        add_layer(folder, model, tensors, block=None)
    packed, dense = loaded(tmp_path, device_map=str(device)), loaded(dense_files)
    assert len(list(packed_layers(prediction_model(packed)))) >= 5
    tokens, hidden = random_tokens(1, 9), torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
    result, exact = (
        layer.forward_layer(0, hidden.to(where), torch.arange(9, device=where)[None], None, tokens.to(where))
        for layer, where in ((prediction_model(packed), device), (prediction_model(dense), "cpu"))
    )
    assert distance(result, exact) < BAR
    assert greedy(packed, tokens, use_mtp=True)[0] == greedy(packed, tokens)[0]


@contextmanager
def in_a_call(cache: Any) -> Iterator[None]:
    """What runs inside is a step of assisted generation, after which drafts are taken back."""
    token = current.set(Call(1, cache=cache))
    try:
        yield
    finally:
        current.reset(token)


def recording(model: Any, tokens: Tensor) -> Any:
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(input_ids=tokens, use_cache=True, **with_cache(cache))
    return cache


def test_the_state_is_read_once_in_a_step(folders: Any) -> None:
    device = ready("mps")
    transformers.enable(rollback=True)
    model, tokens, read = loaded(folders()).to(device), random_tokens(1, 90).to(device), {}
    cache = recording(model, tokens[:, :70])
    with in_a_call(cache):
        for drafted in (1, 2, 4, 8):
            with profiled() as profile:
                model(input_ids=tokens[:, 70 : 71 + drafted], use_cache=True, **with_cache(cache))
            (figures,) = (each for name, each in profile.kernels.items() if name.startswith("gdn_decode"))
            assert figures.dispatches == 1
            read[drafted] = figures.device_bytes_read
            cache.crop(-drafted)
    state = cache.layers[0].recurrent_states[0].nbytes
    assert read[1] >= state
    assert all(read[drafted] - read[1] < (drafted - 1) * state / 4 for drafted in (2, 4, 8))


def test_steps_of_any_length_on_mps(folders: Any) -> None:
    """The states of a step go on in a longer one, in one that has no slots, and in a single token."""
    steps = ((3, 1), (5, 0), (2, 1), (9, 8), (1, 0), (4, 2), (20, 3), (17, 16), (6, 5))
    device, tokens = ready("mps"), random_tokens(1, 200)
    transformers.enable(rollback=True)
    model = loaded(folders())
    result, exact = [], []
    for logits, where in ((exact, torch.device("cpu")), (result, device)):
        model, on_device, end = model.to(where), tokens.to(where), 66
        cache = recording(model, on_device[:, :end])
        with in_a_call(cache):
            for length, taken in steps:
                output = model(input_ids=on_device[:, end : end + length], use_cache=True, **with_cache(cache))
                logits.append(output.logits)
                cache.crop(-taken)
                end += length - taken
        logits.append(cache.layers[0].recurrent_states[0])
    assert max(map(distance, result, exact)) < BAR


def test_more_than_a_step_is_not_taken_back(folders: Any) -> None:
    device = ready("mps")
    transformers.enable(rollback=True)
    model, tokens = loaded(folders()).to(device), random_tokens(1, 20).to(device)
    cache = recording(model, tokens[:, :15])
    with in_a_call(cache):
        model(input_ids=tokens[:, 15:], use_cache=True, **with_cache(cache))
    with pytest.raises(ValueError, match="tokens_to_remove: expected at least -4, got -5"):
        cache.crop(-5)


@pytest.mark.parametrize("device_name", ["cpu", "mps"])
@pytest.mark.parametrize("options", [{"use_mtp": True}, {"prompt_lookup_num_tokens": 3}], ids=["layer", "lookup"])
def test_a_conversation(folders: Any, options: dict[str, Any], device_name: str) -> None:
    from torch_gdn.integrations.transformers.conversation import ConversationCache

    transformers.enable(rollback=True)
    device = ready(device_name)
    model, prompt = loaded(folders("qwen3_5", "sometimes")).to(device), random_tokens(1, 90).to(device)
    conversations = ConversationCache(model, max_bytes=2**30, every=64)
    given: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 12}
    for turn in range(3):
        answer = conversations.generate(prompt, **given, **options)
        assert torch.equal(answer, model.generate(prompt, **given))
        assert conversations.last.reused == (0, 101, 120)[turn]
        prompt = torch.cat([answer, random_tokens(1, 7, seed=turn).to(device)], 1)


@pytest.mark.parametrize(("kind", "tokens"), [("qwen3_5", 1), ("qwen3_5", 2), ("qwen3_5", 4), ("bailing_hybrid", 2)])
def test_drafts_of_calls_that_do_not_ask(folders: Any, kind: str, tokens: int) -> None:
    transformers.disable()
    model, prompt = loaded(folders(kind)), random_tokens(1, PROMPT)
    given = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": GREEDY_TOKENS}
    expected = model.generate(prompt, **given)
    transformers.enable(drafts=tokens)
    steps = Steps(model)
    assert torch.equal(model.generate(prompt, **given), expected)
    fewest = 1 + -(-(GREEDY_TOKENS - 1) // (tokens + 1))
    assert fewest <= steps.taken <= fewest + 2


def test_sampled_tokens_have_the_models_probabilities(tmp_path: Path) -> None:
    """The layers add nothing, so that a token depends on the one before it alone. The drafts have other probabilities,
    and some are rejected.
    """
    transformers.enable(rollback=True)
    model = loaded(written(tmp_path, "qwen3_5", scale=0.0, sign=1.0, noise=0.1))
    model.generation_config.update(do_sample=True, top_k=3, temperature=4.0, pad_token_id=0)
    logits = model(torch.arange(64)[:, None]).logits[:, 0].double() / 4.0
    kept = logits.topk(3).indices
    exact = torch.zeros_like(logits).scatter(1, kept, logits.gather(1, kept).softmax(1))
    counts, steps, drawn = torch.zeros(64, 64, dtype=torch.float64), Steps(model), 200
    for seed in range(3):
        torch.manual_seed(seed)
        text = model.generate(random_tokens(1, 4, seed=seed), use_mtp=True, max_new_tokens=drawn)[0, 3:]
        counts.index_put_((text[:-1], text[1:]), torch.ones(drawn, dtype=torch.float64), accumulate=True)
    assert 0.6 * 3 * drawn < steps.taken < 0.9 * 3 * drawn  # neither all are accepted nor none
    expected = exact * counts.sum(1, keepdim=True)
    assert not counts[exact == 0].any()
    common = expected >= 5
    statistic = float(((counts - expected) ** 2 / expected)[common].sum())
    freedom = int(common.sum() - common.any(1).sum())
    assert freedom > 20
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)
    by_rank = [x.gather(1, kept).sum(0) for x in (counts, expected)]
    assert float(((by_rank[0] - by_rank[1]) ** 2 / by_rank[1]).sum()) < 13.8, by_rank  # 1 in 1,000, for two degrees


class Chain:
    """A prediction model whose logits depend on the last token alone."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def forward_layer(self, _: int, hidden: Tensor, *others: Any, input_ids: Tensor) -> Tensor:
        return self.logits[input_ids]

    def _project_to_logits(self, hidden: Tensor) -> Tensor:
        return hidden


def never(text: Tensor, _: Any) -> Tensor:
    return torch.zeros(len(text), dtype=torch.bool)


def test_accepted_drafts_have_the_models_probabilities() -> None:
    """Any draw, accepted or from the residual, follows the token before it as the model says."""
    from transformers.generation import utils

    transformers.enable(rollback=True)
    drafted, model = (2 * torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    layer = object.__new__(PredictionDrafts)
    vars(layer).update(mtp_model=Chain(drafted), device=torch.device("cpu"), do_sample=True, logits_processor=None)
    layer.mtp_cache = SimpleNamespace(crop=lambda tokens: None)
    counts, accepted, draws = torch.zeros(4, 4, dtype=torch.float64), [0, 0, 0], 1000
    token = current.set(Call(2, criteria=[never]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = torch.zeros(draws, 1, dtype=torch.long)
        tokens, logits = layer.draft(start, torch.zeros(draws, 1, 4), torch.zeros(draws, 1), 2)
        for row, text in enumerate(torch.cat([start, tokens], 1)[:, None]):
            new, matches = utils._speculative_sampling(text, logits[row, None], 2, model[text])
            accepted[matches] += 1
            for before, after in itertools.pairwise([0, *new[0].tolist()]):
                counts[before, after] += 1
    current.reset(token)
    expected = model.double().softmax(1) * counts.sum(1, keepdim=True)
    statistic = ((counts - expected) ** 2 / expected).sum(1)
    assert statistic.max() < 21.1, statistic  # 1 in 10,000, for three degrees
    assert min(accepted) > draws / 10, accepted


def test_a_model_that_moves_takes_its_layer_with_it(folders: Any) -> None:
    transformers.enable(rollback=True)
    model, prompt = loaded(folders()), random_tokens(1, PROMPT)
    greedy(model, prompt, use_mtp=True)
    model = model.to(torch.bfloat16)
    assert greedy(model, prompt, use_mtp=True)[0] == greedy(model, prompt)[0]
    assert prediction_model(model).layers[0].eh_proj.weight.dtype == torch.bfloat16


def test_no_hook_stays(folders: Any) -> None:
    """A block with a hook would run on transformers' own code."""
    transformers.enable(rollback=True)
    model = loaded(folders())
    greedy(model, random_tokens(1, PROMPT), use_mtp=True)
    assert not [name for name, module in model.named_modules() if module._forward_hooks]


@pytest.mark.parametrize("kind", ["qwen3_5", "olmo_hybrid", "bailing_hybrid"])
def test_files_without_the_layer_are_an_error(kind: str, tmp_path: Path) -> None:
    transformers.enable(rollback=True)
    random_model(kind).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="weights are missing from"):
        greedy(loaded(tmp_path), random_tokens(1, 5), use_mtp=True)


def test_a_model_without_the_layer_is_an_error() -> None:
    transformers.enable(rollback=True)
    with pytest.raises(ValueError, match="This model probably has no associated mtp weights"):
        greedy(random_model("kimi_linear"), random_tokens(1, 5), use_mtp=True)


def test_a_model_without_files_is_an_error() -> None:
    transformers.enable(rollback=True)
    with pytest.raises(ValueError, match="use_mtp: expected a model from from_pretrained"):
        greedy(random_model("qwen3_5"), random_tokens(1, 5), use_mtp=True)
