"""Finds kernels that do not compile or compute wrong numbers on this machine, and replaces them.

When an op on `mps` first launches a kernel variant, the same call also runs on the CPU kernel, on copies of what it
touches, and the results are compared up to rounding. The verdict holds for this device, macOS build, torch and
torch_gdn, and is stored in a file next to the tuning cache. A kernel that failed is replaced, for the same call first:

    a prefill algorithm         by another one
    a recurrent op              by a prefill algorithm
    any other op                by torch_gdn's CPU kernel, on copies

One warning per process has the line to report, and `python -m torch_gdn info` lists what failed. The environment
variable TORCH_GDN_SELF_TEST says what is tested:

    auto    (default) what has no verdict on this machine yet
    again   everything; the verdicts are written anew
    off     nothing, and nothing is replaced
"""

from torch_gdn.self_test.run import VARIABLE, install, load, mode, on_cpu, replaced

__all__ = ["VARIABLE", "install", "load", "mode", "on_cpu", "replaced"]
