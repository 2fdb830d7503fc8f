"""Finds kernels that do not compile or compute wrong numbers on this machine, and replaces them.

`enable()` for transformers, an AURA cache and the warm-up of servers test the kernels that they need, once per device,
macOS build, torch and torch_gdn: each op runs on a small input on `mps` and is compared with float64 on the CPU. The
verdicts are stored in a file next to the tuning cache. A kernel that failed is replaced:

    a prefill algorithm         by another one
    a recurrent op              by a prefill algorithm
    an op that writes nothing   by torch_gdn's CPU kernel, on copies of the arguments
    an op that writes           by an error

One warning per process has the line to report, and `python -m torch_gdn info` lists what failed. The environment
variable TORCH_GDN_SELF_TEST says what is run:

    auto    (default) what has no verdict on this machine yet
    again   everything; the verdicts are written anew
    off     nothing, and nothing is replaced
"""

from torch_gdn.self_test.replace import erring, replaced
from torch_gdn.self_test.run import VARIABLE, ensure, mode

__all__ = ["VARIABLE", "ensure", "erring", "mode", "replaced"]
