"""Tests which cases of a sweep a run takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import sweeps

SEEDS = [str(number) for number in range(50)]


def case(
    name: str,
    share: int,
    of: str | None = None,
    seeds: int = 1,
    file: str = "test_x",
    among: str | None = None,
    **params: Any,
) -> Any:
    mark = SimpleNamespace(args=(share,), kwargs={"of": of, "seeds": seeds, "among": among})
    name = f"{name}[{'-'.join(map(str, params.values()))}]"
    return SimpleNamespace(
        name=name,
        nodeid=f"tests/{file}.py::{name}",
        parent=SimpleNamespace(nodeid=f"tests/{file}.py"),
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda _: mark if share else None,
    )


def kept(items: list[Any], seed: str) -> list[Any]:
    out = sweeps.left_out(items, seed)
    return [item for item in items if item not in out]


def test_a_share_of_each_function_runs_on_each_device() -> None:
    items = [case(name, 4, device=device, n=n) for name in ("a", "b") for device in ("cpu", "mps") for n in range(10)]
    result = [(item.name.partition("[")[0], item.callspec.params["device"]) for item in kept(items, "seed")]
    assert {key: result.count(key) for key in result} == {
        (name, device): 3 for name in ("a", "b") for device in ("cpu", "mps")
    }


def test_every_case_has_its_turn_and_a_seed_repeats() -> None:
    items = [case("a", 4, n=n) for n in range(8)]
    seen = {seed: [item.name for item in kept(items, seed)] for seed in SEEDS}
    assert {name for names in seen.values() for name in names} == {item.name for item in items}
    assert kept(items, "7") == kept(items[::-1], "7")[::-1]


def test_values_of_one_parameter_are_chosen_for_the_whole_file() -> None:
    items = [
        case(name, 2, "compiler", compiler=c, n=n) for name in ("a", "b") for c in ("clang", "gcc") for n in (1, 2)
    ]
    for seed in SEEDS:
        assert len({item.callspec.params["compiler"] for item in kept(items, seed)}) == 1
        assert len(kept(items, seed)) == 4


def test_files_take_turns_among_seeds_and_a_file_by_itself_runs() -> None:
    own = [case(name, 1, seeds=4, n=n) for name in ("a", "b") for n in range(3)]
    always = case("c", 0, file="test_y", n=1)
    runs = [kept([*own, always], seed) for seed in SEEDS]
    assert all(run in ([*own, always], [always]) for run in runs)
    assert 5 <= sum(len(run) > 1 for run in runs) <= 20
    assert all(kept(own, seed) == own for seed in SEEDS)


def test_a_share_of_several_files_together_runs_on_each_device() -> None:
    items = [
        case(name, 4, among="engine", file=file, device=device)
        for file in ("test_x", "test_y")
        for name in ("a", "b", "c", "d")
        for device in ("cpu", "mps")
    ]
    seen = set()
    for seed in SEEDS:
        run = kept(items, seed)
        assert sorted(item.callspec.params["device"] for item in run) == ["cpu", "cpu", "mps", "mps"]
        seen |= {item.nodeid for item in run}
    assert seen == {item.nodeid for item in items}
    assert kept(items[:8], "seed") == items[:8], "a file that is named runs whole"


def test_a_case_by_itself_and_tests_without_the_mark_run() -> None:
    items = [case("a", 4, n=1), case("b", 0, n=1), case("b", 0, n=2)]
    assert all(kept(items, seed) == items for seed in SEEDS)


@pytest.mark.xdist_group("probe")
def test_grouped_tests_share_a_process(request: pytest.FixtureRequest) -> None:
    """Otherwise fixtures that take a minute would run in every process."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("tests are grouped with --dist loadgroup alone, as in `make test`")
    assert request.node.nodeid.endswith("@probe")


def test_a_sweep_inside_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for seed in SEEDS:
        monkeypatch.setenv(sweeps.VARIABLE, seed)
        assert len(sweeps.share_of(range(10), 4)) == 3
        seen |= set(sweeps.share_of(range(10), 4))
    assert seen == set(range(10))
    monkeypatch.setenv(sweeps.VARIABLE, "all")
    assert sweeps.share_of(range(10), 4) == list(range(10))


def test_the_head_of_a_run_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sweeps.VARIABLE, "abc")
    assert "TORCH_GDN_SWEEPS=abc repeats it" in sweeps.header()
    monkeypatch.setenv(sweeps.VARIABLE, "all")
    assert sweeps.header() == "sweeps: every case"
    monkeypatch.delenv(sweeps.VARIABLE)
    assert sweeps.seed_of_run() in sweeps.header()
