"""`python -m torch_gdn.check`: what torch_gdn does on this machine's mps device, in one report.

`steps` defines a step, `plan` lists all, `worker` runs them in a process of its own, `report` shows the results.
`calls` has the calls whose kernels are compiled, on tensors of `fake_mps`. `cases`, `bounds`, `golden` and `seeded`
make inputs and judge results; the tests use them too.
"""
