"""Imports torch_gdn.distributed in a PyTorch that seems to have collectives for mps: python own_back_end.py"""

from __future__ import annotations

import torch
import torch.distributed as dist


def main() -> None:
    own = torch.library.Library("c10d", "IMPL", "MPS")
    own.impl("allreduce_", lambda *given: given)
    dist.Backend.default_device_backend_map["mps"] = "metal"
    from torch_gdn import distributed

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    print("KERNELS", *(name for name in distributed.COLLECTIVES if has_kernel(f"c10d::{name}", "MPS")))
    try:
        dist.init_process_group(distributed.NAME, store=dist.HashStore(), rank=0, world_size=1)
    except RuntimeError as error:
        print("REFUSED", error)


if __name__ == "__main__":
    main()
