"""Tests `enable(drafts="auto")`: what it measures, what it costs, and that tokens stay those without drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.drafted import files, loaded
from tests.integrations.models import random_model, random_tokens
from tests.integrations.serving import other_version
from torch_gdn.integrations import transformers
from torch_gdn.integrations.transformers import draft_choice
from torch_gdn.integrations.transformers.draft_choice import DRAFTED, PLAIN, Choice
from torch_gdn.integrations.transformers.versions import with_cache

if reason := other_version("rollback"):
    pytest.skip(reason, allow_module_level=True)
from transformers import DynamicCache

pytestmark = pytest.mark.usefixtures("serving")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(draft_choice, "choices", {})
    yield


def simulate(choice: Choice, tokens: int, drafted: float, accepted: int = 0) -> tuple[float, dict[str, int]]:
    """Runs a choice for so many tokens, of one second each without drafts. Returns the seconds, and tokens by way."""
    seconds, ran = 0.0, {PLAIN: 0, DRAFTED: 0}
    while (left := tokens - sum(ran.values())) > 0:
        way, most = choice.next_segment()
        segment = min(most, left)
        took = segment * (drafted if way == DRAFTED else 1.0)
        drafts = segment if way == DRAFTED else 0
        choice.add(way, segment, segment - 2, took * (segment - 2) / segment, drafts, min(accepted, drafts))
        seconds, ran[way] = seconds + took, ran[way] + segment
    return seconds, ran


@pytest.mark.parametrize("drafted", [1.05, 1 / 0.9, 1.2, 1 / 0.7, 1.6, 2.0])
def test_finding_out_costs_little_where_drafts_do_not_pay(drafted: float) -> None:
    seconds, _ = simulate(Choice(), 1000, drafted)
    assert seconds < 1.03 * 1000


@pytest.mark.parametrize("drafted", [0.3, 0.7, 0.95])
def test_drafts_run_where_they_pay(drafted: float) -> None:
    _, ran = simulate(Choice(), 1000, drafted)
    assert ran[PLAIN] <= 32 + 8


def test_both_ways_take_turns_at_first() -> None:
    choice, ways = Choice(), []
    for _ in range(8):
        ways.append(choice.next_segment())
        choice.add(ways[-1][0], 8, 6, 6.0)
    assert ways == [(DRAFTED, 8), (PLAIN, 8)] * 4
    assert choice.is_chosen


def test_the_other_way_is_looked_at_after_512_tokens() -> None:
    """The text, or the machine, may have changed since."""
    choice = Choice()
    simulate(choice, 64, drafted=1.2)
    assert choice.next_segment() == (PLAIN, 512)
    choice.add(PLAIN, 512, 511, 511.0)
    assert choice.next_segment() == (DRAFTED, 8)
    assert choice.add(DRAFTED, 8, 6, 3.0)
    assert choice.next_segment() == (DRAFTED, 512)


def test_a_short_answer_does_not_end_the_time_of_the_faster_way() -> None:
    choice = Choice()
    simulate(choice, 64, drafted=1.2)
    choice.add(PLAIN, 100, 99, 99.0)
    assert choice.next_segment() == (PLAIN, 412)


def test_the_choice_is_kept_by_model_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.json"
    monkeypatch.setenv("TORCH_GDN_TUNING_CACHE", str(file))
    file.write_text(json.dumps({"version": 4, "devices": {"M9": []}}), encoding="utf-8")
    simulate(draft_choice.choice_of("a model", CPU), 64, drafted=0.5, accepted=6)
    simulate(draft_choice.choice_of("a slower one", CPU), 64, drafted=2.0)
    for model in ("a model", "a slower one"):
        draft_choice.keep(model, CPU)
    draft_choice.choices.clear()
    assert draft_choice.choice_of("a slower one", CPU).faster == PLAIN
    result = draft_choice.choice_of("a model", CPU)
    assert result.next_segment() == (DRAFTED, 512)
    assert result.seconds == {PLAIN: 1.0, DRAFTED: 0.5}
    assert (result.proposed, result.accepted) == (32, 24)
    assert not draft_choice.choice_of("another", CPU).is_chosen
    assert json.loads(file.read_text(encoding="utf-8"))["devices"] == {"M9": []}


NO_TIME = {"seconds": {PLAIN: 0.0, DRAFTED: 1.0}, "proposed": 0, "accepted": 0}


@pytest.mark.parametrize("drafts", [[], {"cpu": 1}, {"cpu": {"m": {"seconds": {}}}}, {"cpu": {"m": NO_TIME}}], ids=str)
def test_a_file_that_keep_did_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: Any) -> None:
    file = tmp_path / "table.json"
    monkeypatch.setenv("TORCH_GDN_TUNING_CACHE", str(file))
    file.write_text(json.dumps({"version": 4, "devices": {}, "drafts": drafts}), encoding="utf-8")
    with pytest.warns(UserWarning, match="drafts are measured anew: .*expected seconds, proposed, accepted by device"):
        assert not draft_choice.choice_of("m", CPU).is_chosen


class Clock:
    """Stands still but for the model's steps: each takes as long as its number of tokens says."""

    def __init__(self, model: Any, seconds: dict[int, float]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.steps: list[int] = []
        model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, _: Any, __: Any, given: dict[str, Any]) -> None:
        self.steps.append(given["input_ids"].numel())
        self.now += self.seconds.get(self.steps[-1], 0.0)

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("two_cost", "way"), [(1.1, DRAFTED), (5.0, PLAIN)])
def test_auto_runs_the_faster_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_cost: float, way: str) -> None:
    transformers.disable()
    folder, prompt = files(tmp_path, "qwen3_5", "always"), random_tokens(1, 20)
    given = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 100}
    expected = loaded(folder).generate(prompt, **given)
    transformers.enable(drafts="auto")
    model = loaded(folder)
    clock = Clock(model, {1: 1.0, 2: two_cost})
    monkeypatch.setattr(draft_choice, "clock", clock)
    cache = DynamicCache(config=model.config)
    assert torch.equal(model.generate(prompt, **given, **with_cache(cache)), expected)
    assert not cache.layers[0].record_past  # plain steps decode in place
    assert not {"torch_gdn_history", "torch_gdn_steps"} & vars(cache.layers[0]).keys()
    (name, text), *others = transformers.status().drafts.items()
    assert not others and name.startswith(f"{folder} on cpu")
    assert text.startswith(f"{way}: ") and text.endswith("% accepted")
    assert (2 in clock.steps[-6:]) == (way == DRAFTED)


@pytest.mark.parametrize("drafts", ["auto", 2])
def test_a_streamer_gets_what_plain_steps_give(tmp_path: Path, drafts: Any) -> None:
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):
        tokens: list[int] = []  # noqa: RUF012

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist() if value.dim() == 1 or not self.tokens else [-2]

        def end(self) -> None:
            self.tokens.append(-1)

    transformers.enable(drafts=drafts)
    model = loaded(files(tmp_path, "qwen3_5", "always"))
    text = model.generate(random_tokens(1, 9), do_sample=False, max_new_tokens=20, streamer=Streamer())
    assert Streamer.tokens == [*text[0].tolist(), -1]


def test_a_sampled_text_has_the_length_that_was_asked_for(tmp_path: Path) -> None:
    transformers.enable(drafts="auto")
    model = loaded(files(tmp_path, "qwen3_5", "sometimes"))
    torch.manual_seed(0)
    text = model.generate(random_tokens(1, 9), do_sample=True, pad_token_id=0, max_new_tokens=45)
    assert text.shape == (1, 54)


def test_files_without_the_layer_are_not_drafted_for(tmp_path: Path) -> None:
    """A model that was trained further and saved has lost it. The warning comes once."""
    transformers.enable(drafts="auto")
    random_model("qwen3_5").save_pretrained(tmp_path)
    model, prompt = loaded(tmp_path), random_tokens(1, 9)
    with pytest.warns(UserWarning, match="no drafts for Qwen3_5ForCausalLM: .*weights are missing from") as warned:
        result = [model.generate(prompt, do_sample=False, max_new_tokens=5) for _ in range(2)]
    assert len([each for each in warned if "no drafts" in str(each.message)]) == 1
    transformers.disable()
    assert torch.equal(result[1], model.generate(prompt, do_sample=False, max_new_tokens=5))


def test_other_calls_stay_as_they_are(tmp_path: Path) -> None:
    """Those of several texts, and those that return more than tokens."""
    transformers.enable(drafts="auto")
    model = loaded(files(tmp_path, "qwen3_5", "always"))
    model.generate(random_tokens(2, 9), do_sample=False, pad_token_id=0, max_new_tokens=3)
    model.generate(random_tokens(1, 9), do_sample=False, max_new_tokens=3, return_dict_in_generate=True)
    assert transformers.status().drafts == {}


@pytest.mark.parametrize("drafts", [0, 17, True, 1.0, "yes"])
def test_what_is_refused(drafts: Any) -> None:
    with pytest.raises(ValueError, match='enable: drafts: expected "auto", None or 1 to 16, got'):
        transformers.enable(drafts=drafts)
