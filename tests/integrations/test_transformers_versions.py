"""Runs the same tests with the other versions of transformers, each in a separate process."""

from __future__ import annotations

import subprocess

import pytest

from tests.integrations import versions


@pytest.mark.versions
@pytest.mark.sweep(8, of="version", seeds=2)
@pytest.mark.parametrize("version", versions.PACKAGES)
def test_with_transformers(version: str) -> None:
    try:
        versions.folder(version)
    except versions.Unavailable as reason:
        pytest.skip(str(reason))
    finished = versions.run_tests(version, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert finished.returncode == 0, finished.stdout
