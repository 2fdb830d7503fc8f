"""Makes the wheels and the cross-built extension once for all tests of this folder. Skips if a wheel is missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from evidence.proof.checks import Silent
from evidence.proof.mac import apple_headers, wheels
from evidence.proof.mac import build as mac_build
from evidence.proof.mac import checks as mac_checks
from evidence.proof.metal import front_end
from evidence.proof.reasons import Unavailable


def wheel_or_skip(find: Callable[[], wheels.Wheel]) -> wheels.Wheel:
    try:
        return find()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def torch_wheel() -> wheels.Wheel:
    return wheel_or_skip(wheels.torch)


@pytest.fixture(scope="session")
def mlx_wheel() -> wheels.Wheel:
    return wheel_or_skip(wheels.mlx_metal)


@pytest.fixture(scope="session")
def build(torch_wheel: wheels.Wheel, mlx_wheel: wheels.Wheel) -> mac_build.Build:
    """Builds and links the whole extension. Objects are kept between runs, and rebuilt when their sources change."""
    return mac_checks.built(Silent())


@pytest.fixture(scope="session")
def reference(mlx_wheel: wheels.Wheel) -> apple_headers.Reference:
    return mac_checks.apple_reference()


@pytest.fixture(scope="session")
def names(torch_wheel: wheels.Wheel) -> frozenset[str]:
    """Returns Apple's names that torch's own macOS library uses."""
    return apple_headers.names_used_by(mac_checks.torch_library())


@pytest.fixture
def shaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder that the strict front end reads: a copy of the shaders, which a test may change."""
    copy = shutil.copytree(front_end.SHADERS, tmp_path / "shaders")
    monkeypatch.setattr(front_end, "SHADERS", copy)
    return copy
