"""The commands of torch_gdn:

    python -m torch_gdn.info                     versions, the machine, the ops and the kernels: for a bug report
    python -m torch_gdn.check                    computes, compares and times everything on the mps device: a report
    python -m torch_gdn.tune                     measures which prefill algorithm is fastest here, and keeps the result
    python -m torch_gdn.integrations.vllm.serve  `vllm serve` on mps

Each takes --help.
"""

import argparse

argparse.ArgumentParser(
    prog="python -m torch_gdn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
).parse_args()
print(__doc__.strip())
