"""Trains a small model with Gated DeltaNet layers: python training.py RANK SIZE ADDRESS WAY

WAY is one, ddp or fsdp. Prints the losses of three steps over the whole batch as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, silu

import torch_gdn
import torch_gdn.distributed
import torch_gdn.fsdp

H, HV, K, V, HIDDEN, WORDS, TOKENS, BATCH = 1, 2, 16, 16, 32, 64, 24, 4


class Layer(nn.Module):
    """A Gated DeltaNet layer: projections, gates, the rule, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, 2 * H * K + HV * V, bias=False)
        self.gates = nn.Linear(HIDDEN, 2 * HV, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(HV)), nn.Parameter(torch.ones(HV))
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.output = nn.Linear(HV * V, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        mixed = silu(self.project(torch_gdn.rms_norm(x, self.norm)))
        q, k, v = mixed.split([H * K, H * K, HV * V], -1)
        a, b = self.gates(x).chunk(2, -1)
        g = torch_gdn.fused_gdn_gate(a, self.A_log, self.dt_bias)
        o, _ = torch_gdn.chunk_gated_delta_rule(
            q.view(B, T, H, K),
            k.view(B, T, H, K),
            v.view(B, T, HV, V),
            g,
            b.sigmoid(),
            use_qk_l2norm_in_kernel=True,
        )
        return x + self.output(o.reshape(B, T, HV * V))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, HIDDEN), Layer(), Layer(), nn.Linear(HIDDEN, WORDS)).to("mps")


def main(own: str, size: str, address: str, way: str) -> None:
    faulthandler.dump_traceback_later(200, repeat=True)  # where it hangs, or that it is slow
    net: Any = model()
    rank, processes = int(own), int(size)
    if way != "one":
        dist.init_process_group(
            "torch_gdn",
            init_method=f"torch-gdn://{address}",
            rank=rank,
            world_size=processes,
            timeout=timedelta(seconds=100),
        )
    if way == "ddp":
        net = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01)
    if way == "fsdp":
        for module in [*net, net]:
            fully_shard(module, mesh=init_device_mesh("mps", (processes,)))
        assert net[0].weight.to_local().numel() == WORDS * HIDDEN // processes
    words = torch.randint(WORDS, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    own_words = words.chunk(processes)[rank].to("mps")
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    losses = []
    for _ in range(3):
        loss = cross_entropy(net(own_words[:, :-1]).flatten(0, 1), own_words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if way != "one":
            dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    print("LOSSES" + json.dumps(losses), flush=True)
    if way != "one":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
