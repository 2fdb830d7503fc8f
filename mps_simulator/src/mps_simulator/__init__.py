"""A Metal device for machines without one.

`activate()` makes PyTorch's device "mps" work on Linux, and `load(sources)` builds Objective-C++ and C++ written for a
Mac, unchanged, and loads it: its shaders run on an engine that checks every memory access. docs/simulator.md has an
example; see also `python -m simulator --help`.
"""

from simulator import metal
from simulator.activation import activate
from simulator.build import BuildError
from simulator.device import settings
from simulator.fault import Fault
from simulator.loading import load
from simulator.profiling import Profile, profile

__all__ = ["BuildError", "Fault", "Profile", "activate", "load", "metal", "profile", "settings"]
