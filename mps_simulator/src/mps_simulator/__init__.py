"""A Metal device for machines without one.

`activate()` makes PyTorch's device "mps" work on Linux, and `load(sources)` builds Objective-C++ and C++ written for a
Mac, unchanged, and loads it: its shaders run on an engine that checks every memory access. The README has an example;
see also `python -m mps_simulator --help`.
"""

from mps_simulator import metal
from mps_simulator.activation import activate, active_settings
from mps_simulator.build import BuildError
from mps_simulator.device import settings
from mps_simulator.fault import Fault
from mps_simulator.loading import load
from mps_simulator.profiling import Profile, profile

__all__ = ["BuildError", "Fault", "Profile", "activate", "active_settings", "load", "metal", "profile", "settings"]
