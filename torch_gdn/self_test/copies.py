"""Runs a call of an op on the CPU, on copies of its arguments.

It copies only those slots, pages or rows of a pool that the call names: those of a batch, not of a whole cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Call = dict[str, Any]
Compared = tuple[str, Tensor, Tensor, Tensor | None]  # name, the device's value, the CPU's, and that before the call
PAGES = ("key_cache", "value_cache")
# Arguments that name rows of pools, and the pools.
POOLS = {
    ("state_indices", "checkpoint_indices"): ("state_pool", "conv_pool"),
    ("block_table",): (*PAGES, "key_codes", "key_norms", "value_codes", "value_norms", "key_tile_means", "tile_means"),
    ("slot_mapping",): PAGES,
    ("exact_slots", "exact_sink_slots"): ("exact_keys", "exact_values"),
    ("topk_ids",): ("w_gate_up", "w_down", "w_scales", "w_biases"),
    ("indices",): ("weight", "scales", "biases"),
}


def pools_of(call: Call) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the names of arguments that name rows, and of the pools that they name them of."""
    for indices, pools in POOLS.items():
        given, named = ([x for x in names if isinstance(call.get(x), Tensor)] for names in (indices, pools))
        shares_scales = "indices" in given and call["weight"].dtype == torch.uint8  # rows of e4m3 numbers
        if given and named and not shares_scales:
            yield given, named


def with_needed_pages(call: Call) -> Call:
    """Drops the columns of a block table behind the last page of the longest sequence."""
    pages = call.get("key_cache", call.get("key_codes"))
    if pages is None or "max_seq_len" not in call:
        return call
    return call | {"block_table": call["block_table"][:, : -(-call["max_seq_len"] // pages.size(1))]}


def copied_bytes(call: Call) -> float:
    """Returns about as many bytes as `Copies` copies, or more. Reads no tensor."""
    call = with_needed_pages(call)
    sizes = {name: float(x.numel() * x.element_size()) for name, x in call.items() if isinstance(x, Tensor)}
    for indices, pools in pools_of(call):
        rows = 1 + sum(call[name].numel() for name in indices)
        sizes |= {name: sizes[name] * min(1.0, rows / max(1, len(call[name]))) for name in pools}
    return sum(sizes.values())


class Copies:
    """The arguments of a call on `mps`, copied to the CPU. This waits for the device.

    Attributes:
        call: The same call on the CPU.
        written: The copies of the arguments that the op writes, as they are before the call.
    """

    def __init__(self, overload: Any, call: Call) -> None:
        self.overload, self.original = overload, call
        self.device = next(x.device for x in call.values() if isinstance(x, Tensor) and x.device.type != "cpu")
        names = [each.name for each in overload._schema.arguments if each.alias_info and each.alias_info.is_write]
        self.call, self.rows = dict(with_needed_pages(call)), dict[str, Tensor]()
        for indices, pools in pools_of(self.call):
            self.call, kept = with_rows(self.call, indices, pools)
            self.rows |= dict.fromkeys(pools, kept.to(self.device))
        self.call |= {name: self.copied(name, x) for name, x in self.call.items() if isinstance(x, Tensor)}
        self.written: dict[str, Tensor] = {name: self.call[name] for name in names if self.call.get(name) is not None}
        self.call |= {name: x.clone() for name, x in self.written.items()}

    def copied(self, name: str, x: Tensor) -> Tensor:
        return (x.index_select(0, self.rows[name]) if name in self.rows else x).cpu()

    def run(self) -> None:
        self.results = self.overload(**self.call)

    def compared(self, results: Any) -> list[Compared]:
        """Returns all results, and arguments that the op writes, that have elements."""
        returns = [each.name or "result" for each in self.overload._schema.returns]
        triples = zip(returns, tree_leaves(results), tree_leaves(self.results), strict=False)
        compared: list[Compared] = [(name, x.cpu(), own, None) for name, x, own in triples]
        for name, before in self.written.items():
            compared.append((name, self.copied(name, self.original[name]), self.call[name], before))
        return [each for each in compared if each[1].numel()]

    def write_back(self) -> Any:
        """Writes what the CPU's kernel wrote, and returns its results on the device."""
        for name in self.written:
            x, value = self.original[name], self.call[name].to(self.device)
            if name in self.rows:
                x.index_copy_(0, self.rows[name], value)
            else:
                x.copy_(value)
        return tree_map_only(Tensor, lambda x: x.to(self.device), self.results)


def with_rows(call: Call, indices: list[str], pools: list[str]) -> tuple[Call, Tensor]:
    """Returns the call with indices into pools of only the rows that it names, and these rows.

    Indices that name no slot, or none that exists, stay as they are. So do the rows up to the null index.
    """
    null = call.get("null_index", -1) if "state_indices" in indices else -1
    page = call[pools[0]].size(1) if indices == ["slot_mapping"] else 1
    rows = {name: call[name].cpu().div(page, rounding_mode="floor") for name in indices}
    named = torch.cat([x.flatten().long() for x in rows.values()]).unique()
    named = named[(named > null) & (named < len(call[pools[0]]))]
    result: Call = {}
    for name, x in rows.items():
        is_named = torch.isin(x, named)
        moved = (torch.searchsorted(named, x.contiguous()) + null + 1) * page + call[name].cpu() % page
        result[name] = torch.where(is_named, moved, call[name].cpu()).to(x.dtype)
    return call | result, torch.cat([torch.arange(null + 1), named])


def on_the_cpu(overload: Any, call: Call) -> Any:
    """Runs the op's CPU kernel on copies of the arguments. Returns its results, and writes what it wrote."""
    copies = Copies(overload, call)
    copies.run()
    return copies.write_back()
