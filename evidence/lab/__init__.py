"""The laboratory: evidence about the kernels from machines that are not Macs. No user needs it.

`evidence.lab.cuda` replays the shaders on an NVIDIA GPU; `evidence.lab.agx` compiles them to machine code for M1 and M2
with Mesa's compiler. Delete both, with their tests and their pages in docs/lab (second-machine.md, apple-isa.md), once
reports of `python -m torch_gdn check` from Macs show that Apple's compiler takes every kernel, and how fast each one
is. `evidence.lab.studies` says when each of its modules may go.
"""
