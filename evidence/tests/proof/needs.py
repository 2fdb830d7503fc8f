"""Says what the tests of strict Metal and of the simulated device need."""

from __future__ import annotations

import shutil

import pytest

from evidence.proof.metal.front_end import CLANG
from tests.helpers.devices import on_a_mac

needs_clang = pytest.mark.skipif(shutil.which(CLANG) is None, reason=f"{CLANG} is missing: apt-get install clang-19")
needs_simulated_device = pytest.mark.skipif(on_a_mac(), reason="this machine has a Metal device of its own")
