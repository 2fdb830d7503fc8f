"""Runs the shaders on an NVIDIA GPU: a second machine, by other makers, with the same Metal text and the same launches.

It shows neither Metal's own rules (evidence/proof/metal does) nor Apple's speed. But its compiler, scheduler and memory
checkers know nothing about the simulated device.
"""
