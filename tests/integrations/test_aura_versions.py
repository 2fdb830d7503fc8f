"""Runs AuraCache's tests with the other versions of transformers whose caches are made of layers."""

from __future__ import annotations

import subprocess

import pytest

from tests.integrations import versions


@pytest.mark.versions
@pytest.mark.sweep(8, of="version", seeds=2)
@pytest.mark.parametrize("version", ["5.12.0", "5.16.0"])
def test_with_transformers(version: str) -> None:
    try:
        versions.folder(version)
    except versions.Unavailable as reason:
        pytest.skip(str(reason))
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not mps")
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    files = (
        "tests/aura/test_aura_cache.py",
        "tests/aura/test_aura_cache_windows.py",
        "tests/aura/test_aura_cache_file.py",
    )
    finished = versions.run(version, "-m", "pytest", *options, *files, **output)
    assert finished.returncode == 0, finished.stdout
