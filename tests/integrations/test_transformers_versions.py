"""Runs the same tests with the other versions of transformers, each in a separate process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integrations import versions


@pytest.mark.sweep(1, seeds=3)
@pytest.mark.versions
def test_the_names_before_5_24() -> None:
    """Every run tries the names that a cache had until then, in the models and in their layers."""
    tests = [f"tests/integrations/test_transformers_{subject}.py" for subject in ("in_place", "decoding")]
    assert_pass(versions.PREVIOUS, *tests)


@pytest.mark.versions
@pytest.mark.sweep(8, of="version", seeds=2)
@pytest.mark.parametrize("version", versions.PACKAGES)
def test_with_transformers(version: str) -> None:
    assert_pass(version, *versions.tests_with(version))


def test_each_file_exists() -> None:
    """A run takes some of the versions: a file that was renamed would be missed by most of them."""
    files = {file for version in (*versions.PACKAGES, versions.INSTALLED) for file in versions.tests_with(version)}
    assert not [file for file in files if not Path(versions.ROOT, file).exists()]


def assert_pass(version: str, *tests: str) -> None:
    try:
        versions.folder(version)
    except versions.Unavailable as reason:
        pytest.skip(str(reason))
    finished = versions.run_tests(version, *tests, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert finished.returncode == 0, finished.stdout
