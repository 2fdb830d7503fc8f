"""On the path of an engine's processes on the simulated device: makes it device "mps" in each."""

import mps_simulator

mps_simulator.activate()
