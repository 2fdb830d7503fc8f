"""`python -m torch_gdn.check`: what torch_gdn does on this machine's mps device, in one report.

`steps` defines a step, `plan` lists all, `worker` runs them in a process of its own, `report` shows the results.
Which kernels there are to compile is recorded from the calls of `torch_gdn.testing`, on tensors of `fake_mps`. `seeded`
computes these calls, and `golden` those that FLA's outputs were recorded for.
"""
