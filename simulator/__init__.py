"""A Metal device for machines without one.

`activate()` makes PyTorch's device "mps" work on Linux: the Objective-C++ and the shaders of torch_gdn run as they are,
on simulated Metal objects and on an engine that watches every memory access. See `python -m simulator --help`.
"""

from simulator import metal
from simulator.activation import activate, settings
from simulator.fault import Fault
from simulator.profiling import Profile, profile

__all__ = ["Fault", "Profile", "activate", "metal", "profile", "settings"]
