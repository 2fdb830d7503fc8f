"""Tests the choice of a prefill algorithm: the heuristic, the tuning cache, its file and its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import torch_gdn
from tests.helpers.cases import make_case
from tests.helpers.devices import on_a_mac, profiled, ready
from tests.helpers.prefill import ALGORITHMS
from torch_gdn import _C, chunk_gated_delta_rule, command_line
from torch_gdn.tools import tune, tuning_cache
from torch_gdn.tools.tuning_cache import DELTA_RULE, KDA, RULES, Row

DEVICE, CORES = "Apple M1", 8
KEY = _C.tuning_key(DEVICE, CORES)


@pytest.fixture(autouse=True)
def _no_table_is_left() -> Iterator[None]:
    yield
    tuning_cache.install({})


def algorithm(
    tokens: int,
    heads: int = 32,
    K: int = 128,
    V: int = 128,
    device: str = DEVICE,
    cores: int = CORES,
    channel_decays: bool = False,
) -> str:
    return _C.prefill_algorithm(tokens, heads, K, V, device, cores, channel_decays)[0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"tokens": 1}, "recurrent"),
        ({"tokens": 8}, "recurrent"),
        ({"tokens": 9}, "fused_chunk"),
        ({"tokens": 8192}, "fused_chunk"),
        ({"tokens": 383, "heads": 1}, "fused_chunk"),
        ({"tokens": 384, "heads": 1}, "chunked"),  # 4 threadgroups, 8 cores
        ({"tokens": 8192, "heads": 2}, "fused_chunk"),  # 8 threadgroups
        ({"tokens": 8192, "heads": 1, "V": 129}, "fused_chunk"),  # 5 threadgroups
        ({"tokens": 8192, "heads": 3, "cores": 80}, "chunked"),
        ({"tokens": 0, "heads": 0, "cores": 0}, "recurrent"),
    ],
    ids=str,
)
def test_the_heuristic(shape: dict[str, int], expected: str) -> None:
    assert algorithm(**shape) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"tokens": 4}, "recurrent"),
        ({"tokens": 5}, "fused_chunk"),
        ({"tokens": 255, "heads": 1}, "fused_chunk"),
        ({"tokens": 256, "heads": 1}, "chunked"),
        ({"tokens": 8192, "heads": 8}, "chunked"),  # 32 threadgroups, 8 cores
        ({"tokens": 8192, "heads": 8, "V": 129}, "fused_chunk"),  # 40 threadgroups
        ({"tokens": 0, "heads": 0, "cores": 0}, "recurrent"),
    ],
    ids=str,
)
def test_the_heuristic_of_channel_decays(shape: dict[str, int], expected: str) -> None:
    assert algorithm(**shape, channel_decays=True) == expected


def test_the_nearest_measured_shape_decides() -> None:
    rows = [Row(64, 128, 128, "chunked"), Row(1024, 128, 128, "recurrent"), Row(1024, 8, 128, "fused_chunk")]
    rows += [Row(1024, 128, 256, "fused_chunk")]
    tuning_cache.install({KEY: rows})
    assert [algorithm(tokens) for tokens in (1, 64, 255, 257, 100_000)] == ["chunked"] * 3 + ["recurrent"] * 2
    assert [algorithm(1024, heads) for heads in (1, 7, 9, 32)] == [
        "fused_chunk",
        "fused_chunk",
        "recurrent",
        "recurrent",
    ]
    assert [algorithm(1024, K=K) for K in (64, 128, 180, 182)] == ["recurrent"] * 3 + ["fused_chunk"]
    assert algorithm(1024, heads=128, V=32) == "recurrent"  # as many threadgroups as 32 heads of 128 columns
    assert algorithm(256) == "chunked"  # equally far from both, so the first


SHAPES: list[dict[str, int]] = [{"tokens": tokens, "heads": heads} for tokens in (1, 64, 2048) for heads in (1, 8, 32)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("wanted", _C.prefill_algorithms())
def test_a_row_decides_for_the_rule_that_it_measured(rule: str, wanted: str) -> None:
    """The other rule keeps the heuristic, or goes by its own rows, even if they are farther away."""
    is_kda = rule == KDA
    heuristic = [algorithm(**shape, channel_decays=not is_kda) for shape in SHAPES]
    tuning_cache.install({KEY: [Row(64, 32, 128, wanted, rule=rule)]})
    assert {algorithm(**shape, channel_decays=is_kda) for shape in SHAPES} == {wanted}
    assert [algorithm(**shape, channel_decays=not is_kda) for shape in SHAPES] == heuristic
    (other,) = set(RULES) - {rule}
    for far in _C.prefill_algorithms():
        tuning_cache.install({KEY: [Row(64, 32, 128, wanted, rule=rule), Row(10**6, 10**6, 1, far, rule=other)]})
        assert {algorithm(**shape, channel_decays=is_kda) for shape in SHAPES} == {wanted}
        assert {algorithm(**shape, channel_decays=not is_kda) for shape in SHAPES} == {far}


def test_a_table_is_of_its_device_alone() -> None:
    """A table also belongs to one number of cores: an M3 Max has 30 or 40."""
    tuning_cache.install({_C.tuning_key("Apple M3 Max", 30): [Row(64, 128, 128, "chunked")]})
    assert algorithm(64, device="Apple M3 Max", cores=30) == "chunked"
    assert algorithm(64, device="Apple M3 Max", cores=40) == algorithm(64) == "fused_chunk"
    tuning_cache.install({KEY: []})
    assert algorithm(64) == "fused_chunk"


def test_a_forced_algorithm_goes_before_every_table() -> None:
    tuning_cache.install({KEY: [Row(64, 128, 128, "chunked")]})
    with torch_gdn.prefill_algorithm("recurrent"):
        assert algorithm(64) == algorithm(64, device="another") == "recurrent"


def test_an_excluded_algorithm_gives_way() -> None:
    """The heuristic, the table or the calling thread may have chosen it. The other rule still uses it."""
    try:
        for excluded, expected in (
            (["fused_chunk"], ["chunked", "chunked", "recurrent"]),
            (["chunked"], ["fused_chunk", "fused_chunk", "recurrent"]),
            (["recurrent"], ["chunked", "fused_chunk", "fused_chunk"]),
            (["fused_chunk", "chunked"], ["recurrent"] * 3),
        ):
            _C.exclude_prefill_algorithms(excluded, channel_decays=False)
            shapes: list[dict[str, int]] = [{"tokens": 384, "heads": 1}, {"tokens": 64}, {"tokens": 1}]
            assert [algorithm(**shape) for shape in shapes] == expected
            assert [algorithm(**shape, channel_decays=True) for shape in shapes] == [
                "chunked",
                "fused_chunk",
                "recurrent",
            ]
            tuning_cache.install({KEY: [Row(64, 128, 128, excluded[0])]})
            for name in (None, excluded[0]):
                with torch_gdn.prefill_algorithm(name):
                    assert algorithm(64) in expected
            tuning_cache.install({})
    finally:
        _C.exclude_prefill_algorithms([], channel_decays=False)


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not say which kernels ran")
@pytest.mark.parametrize("wanted", _C.prefill_algorithms())
def test_calls_go_by_the_table(wanted: str) -> None:
    case = make_case(20, 32, 16).to(ready("mps"))
    tuning_cache.install({tuning_cache.key(): [Row(20, 2, 32, wanted)]})
    with profiled() as profile:
        chunk_gated_delta_rule(*case.qkv, **case.options)
    assert {name for name in ALGORITHMS[wanted] if any(each.startswith(name + "_") for each in profile.kernels)} == set(
        ALGORITHMS[wanted]
    )


@pytest.mark.skipif(on_a_mac(), reason="a Mac does not say which kernels ran")
def test_packed_sequences_count_by_their_mean_length() -> None:
    case = make_case(40, 32, 16, cu_seqlens=[0, 5, 10, 15, 40])
    on_device = case.to(ready("mps"))
    tuning_cache.install({tuning_cache.key(): [Row(40, 2, 32, "chunked"), Row(10, 8, 32, "recurrent")]})
    with profiled() as profile:
        chunk_gated_delta_rule(*on_device.qkv, **on_device.options)
    assert [name for name in profile.kernels if name.startswith(ALGORITHMS["recurrent"])]


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "algorithms.json"
    rows = [Row(64, 128, 128, "fused_chunk", 32, rule, {"fused_chunk 32": 1e-3, "chunked": 2e-3}) for rule in RULES]
    table = {DEVICE: rows, "another": []}
    tuning_cache.write(file, table)
    assert tuning_cache.read(file) == table
    assert [path.name for path in file.parent.iterdir()] == ["algorithms.json"]


def test_rows_of_a_file_from_before_rules_had_rows_are_the_delta_rules(tmp_path: Path) -> None:
    file = tmp_path / "algorithms.json"
    file.write_text(json.dumps({"version": 3, "devices": {KEY: [GOOD]}}))
    assert tuning_cache.read(file) == {KEY: [Row(64, 128, 128, "fused_chunk", rule=DELTA_RULE)]}


GOOD: dict[str, Any] = {"tokens": 64, "threadgroups": 128, "K": 128, "algorithm": "fused_chunk"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "expected a table of prefill algorithms: Expecting property name"),
        ("[]", "version: expected 4, got None"),
        ({"version": 1, "devices": {}}, "version: expected 4, got 1"),
        ({"version": 4}, "devices: expected an object of device names, got None"),
        ({"version": 4, "devices": {"Apple M1": 3}}, "Apple M1: expected a list of rows, got 3"),
        ({"version": 4, "devices": {"Apple M1": [7]}}, "Apple M1: row 0: expected an object, got 7"),
        (GOOD | {"tokens": 0}, "row 0: tokens: expected a positive integer, got 0"),
        (GOOD | {"K": True}, "row 0: K: expected a positive integer, got True"),
        (GOOD | {"threadgroups": None}, "row 0: threadgroups: expected a positive integer, got None"),
        (GOOD | {"rule": "mamba"}, "row 0: rule: expected one of 'delta_rule', 'kda', got 'mamba'"),
        (GOOD | {"chunk_size": 64}, "row 0: chunk_size: expected one of (0, 8, 16, 32), got 64"),
        (GOOD | {"algorithm": "chunked", "chunk_size": 8}, "row 0: chunk_size: expected one of (0,), got 8"),
        (
            GOOD | {"algorithm": "quick"},
            "algorithm: expected one of 'chunked', 'fused_chunk', 'recurrent', got 'quick'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_cannot_be_used(content: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it is an error. Importing torch_gdn warns and uses the heuristic."""
    if isinstance(content, dict) and "tokens" in content:
        content = {"version": 4, "devices": {"Apple M1": [content]}}
    file = tmp_path / "algorithms.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as caught:
        tuning_cache.read(file)
    assert str(caught.value).startswith(f"{file}: ") and words in str(caught.value)
    monkeypatch.setenv(tuning_cache.VARIABLE, str(file))
    with pytest.warns(UserWarning, match="the heuristic picks prefill algorithms"):
        tuning_cache.install_file()


def test_the_import_reads_the_file(tmp_path: Path) -> None:
    file = tmp_path / "algorithms.json"
    tuning_cache.write(file, {KEY: [Row(64, 128, 128, "chunked")]})
    program = f"from torch_gdn import _C; print(_C.prefill_algorithm(64, 32, 128, 128, {DEVICE!r}, 8)[0])"
    environment = os.environ | {tuning_cache.VARIABLE: str(file)}
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout == "chunked\n"


@pytest.mark.sweep(1, seeds=3)
def test_the_command_measures_and_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other devices' rows stay. This device's rows are new, of both rules, and apply from now on."""
    ready("mps")
    file = tmp_path / "algorithms.json"
    tuning_cache.write(file, {"Apple M9": [Row(64, 128, 128, "chunked")], tuning_cache.key(): []})
    sizes = ["--shapes", "1,2,32,40", "--tokens", "5", "--sequences", "1", "3", "--dtype", "float32"]
    with patch.object(tune, "median_seconds", wraps=tune.median_seconds) as timed:
        assert tune.main([*sizes, "--repeats", "1", "--file", str(file)]) == 0
    assert {(each.args[0].keywords["q"].dtype, each.args[2]) for each in timed.mock_calls} == {(torch.float32, 1)}
    table = tuning_cache.read(file)
    assert table["Apple M9"] == [Row(64, 128, 128, "chunked")]
    rows = table[tuning_cache.key()]
    expected = [(rule, 5, threadgroups, 32) for rule in RULES for threadgroups in (4, 12)]
    assert [(row.rule, row.tokens, row.threadgroups, row.K) for row in rows] == expected
    cores = _C.device_facts()["core_count"]
    for row in rows:
        assert set(row.seconds) == set(tune.CANDIDATES)
        assert (row.algorithm, row.chunk_size) == tune.CANDIDATES[min(row.seconds, key=row.seconds.__getitem__)]
        heads, name = row.threadgroups // 2, _C.device_facts()["name"]
        taken = _C.prefill_algorithm(row.tokens, heads, 32, 40, name, cores, channel_decays=row.rule == KDA)
        assert taken == (row.algorithm, row.chunk_size)
    printed = capsys.readouterr()
    assert "4/4" in printed.err and f"Written to {file}." in printed.out
    assert ("mean nothing" in printed.out) != on_a_mac()


@pytest.mark.parametrize("rule", RULES)
def test_the_command_measures_the_rule_and_keeps_rows_of_the_other(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that it runs are those of the rule."""
    ready("mps")
    monkeypatch.setattr(tune, "CANDIDATES", {"recurrent": ("recurrent", 0), "fused_chunk 16": ("fused_chunk", 16)})
    file = tmp_path / "algorithms.json"
    tuning_cache.write(file, {tuning_cache.key(): [Row(7, 7, 7, "chunked", rule=each) for each in RULES]})
    sizes = ["--shapes", "1,2,32,40", "--tokens", "5", "--sequences", "1", "--dtype", "float32", "--repeats", "1"]
    with torch_gdn.recording() as recorded:
        assert tune.main([*sizes, "--file", str(file), "--rules", rule]) == 0
    kernels = {variant.kernel for variant in recorded.variants}
    assert ("fused_chunk_kda" in kernels) == (rule == KDA)
    assert ("fused_chunk_gated_delta_rule" in kernels) == (rule == DELTA_RULE)
    kept, new = tuning_cache.read(file)[tuning_cache.key()]
    assert (kept.tokens, new.tokens, new.rule) == (7, 5, rule) and kept.rule != rule


def test_a_warmup_compiles_the_chunks_that_the_table_asks_for_and_no_others() -> None:
    device = ready("mps")
    tuning_cache.install(
        {tuning_cache.key(): [Row(64, 128, 128, "fused_chunk", 32)], "another": [Row(9, 9, 9, "fused_chunk", 8)]}
    )
    names = torch_gdn.warmup([(1, 1, 24, 16)], device=device, dtypes=[torch.float32], progress=False)
    fused = {name for name in names if name.startswith("fused_chunk_gated_delta_rule_")}
    assert fused == {"fused_chunk_gated_delta_rule_float_24_32_4_float"}


def test_without_a_file_to_write() -> None:
    with pytest.raises(SystemExit, match="expected a file to write, since \\$TORCH_GDN_TUNING_CACHE is empty"):
        tune.main([])


def test_the_command_times_each_rule_of_a_table() -> None:
    assert tuple(command_line.TUNED_SHAPES) == RULES
