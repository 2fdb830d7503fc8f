"""`python -m torch_gdn.check`: what torch_gdn does on this machine's mps device, in one report.

`steps` says what a step is, `plan` which there are, `worker` runs them in a process of their own, `report` shows them.
`cases`, `bounds`, `golden` and `seeded` make inputs and judge results; the tests use them too.
"""
