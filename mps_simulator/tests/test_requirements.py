"""Tests which clang builds the simulated device, and the errors for missing tools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mps_simulator import build, requirements


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        ({"clang++-19": "19.1.7", "clang++-20": "20.1.8", "clang++": "21.1.0"}, "clang++-19"),
        ({"clang++-18": "18.1.3", "clang++-21": "21.1.0", "clang++": "18.1.3"}, "clang++-21"),
        ({"clang++": "20.1.8"}, "clang++"),
        ({"clang++": "18.1.3"}, ""),
        ({"clang++": "no version"}, ""),
        ({}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_clang_that_is_chosen(
    versions: dict[str, str], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in versions.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert requirements.clang() == chosen


def test_what_is_missing_is_named_with_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "GCC_DIRECTORIES", (str(tmp_path),))
    monkeypatch.setattr(requirements, "HEADERS", {"blocks": "no/Block.h", "boost": "boost/context/fiber.hpp"})
    gcc = requirements.major_version("g++")
    wanted = f"needs objc/objc.h, no/Block.h: apt-get install libobjc-{gcc}-dev libblocksruntime-dev$"
    with pytest.raises(build.BuildError, match=wanted):
        build.check_tools()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"needs clang 19 or later, .* clang-19 "):
        build.check_tools()


def test_headers_are_found_where_the_compiler_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "HEADERS", {"blocks": "elsewhere/Block.h"})
    assert requirements.missing_headers() == ["blocks"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "Block.h").touch()
    monkeypatch.setenv("CPATH", str(tmp_path))
    assert requirements.missing_headers() == []


def test_environments_that_link_to_one_torch_share_what_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = build.Toolchain.make.__wrapped__().key()
    (tmp_path / "torch").symlink_to(Path(torch.__file__).parent)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    assert build.Toolchain.make.__wrapped__().key() == key
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "another/__init__.py"))
    assert build.Toolchain.make.__wrapped__().key() != key
