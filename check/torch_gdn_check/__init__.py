"""Implements `python -m torch_gdn check`: one report on torch_gdn on this machine's mps device.

`steps` defines a step, `plan` lists all steps, `worker` runs them in a separate process, `report` shows the results.
The kernels to compile are recorded from the calls of `torch_gdn_check.registry`, on tensors of `fake_mps`.
`comparisons` computes these calls, and `golden` those for which FLA's outputs were recorded.
"""
