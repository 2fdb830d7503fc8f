"""The shaders on an NVIDIA GPU: a second machine, of other makers, that runs the same Metal text and the same launches.

Not Metal's own rules (proof/metal has those) and not Apple's speed, but a compiler, a scheduler and memory checkers
that know nothing of the simulated device.
"""
