"""Runs a call of an op on the CPU as well, on copies of its arguments, and compares the results up to rounding.

It copies only the slots, pages or rows of a pool that the call names. The copy has the pool's size, but what is not
written takes no memory.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Call = dict[str, Any]
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
LARGEST_ERROR = 0.05  # of a piece, relative to its own norm, or to that of the average piece if that is larger
LARGEST_SHARE = 0.25  # of integers that may differ: codes of values near the middle between two
PIECE = 32  # elements


def indices_of(call: Call) -> dict[str, tuple[list[Tensor], int]]:
    """Returns by pool the arguments that name its rows, and how many of their numbers name one. Reads no tensor."""
    result: dict[str, tuple[list[Tensor], int]] = {}
    page = next((call[name].size(1) for name in ("key_cache", "key_codes") if name in call), None)
    for names, pools in POOLS.items():
        indices, given = ([x for x in each if isinstance(call.get(x), Tensor)] for each in (names, pools))
        tensors = [call[name] for name in indices]
        if page and indices == ["block_table"]:  # columns behind the longest sequence name no page
            tensors = [call["block_table"][:, : -(-call["max_seq_len"] // page)]]
        # Rows of e4m3 numbers share scales, which are few.
        alike = [name for name in given if indices and len(call[name]) == len(call[given[0]])]
        result |= dict.fromkeys(alike, (tensors, page if page and indices == ["slot_mapping"] else 1))
    return result


def copied_bytes(call: Call) -> float:
    """Returns about as many bytes as `Copies` copies, or more. Reads no tensor."""
    sizes = {name: float(x.nbytes) for name, x in call.items() if isinstance(x, Tensor)}
    for name, (indices, _) in indices_of(call).items():
        sizes[name] *= min(1.0, (1 + sum(x.numel() for x in indices)) / max(1, len(call[name])))
    return sum(sizes.values())


class Copies:
    """The arguments of a call on `mps`, copied to the CPU. This waits for the device.

    `call` is the same call on the CPU. `written` has the arguments that the op writes as they are before the call: of a
    pool, the rows that are copied.
    """

    def __init__(self, overload: Any, call: Call) -> None:
        self.overload, self.original, self.rows = overload, call, dict[str, Tensor]()
        for name, (indices, per_row) in indices_of(call).items():
            rows = torch.cat([x.flatten().cpu().long() for x in indices]).div(per_row, rounding_mode="floor").unique()
            self.rows[name] = rows[(rows >= 0) & (rows < len(call[name]))]  # no slot, or a wrong one, is not copied
        self.call = call | {name: self.copied(name, x) for name, x in call.items() if isinstance(x, Tensor)}
        names = [each.name for each in overload._schema.arguments if each.alias_info and each.alias_info.is_write]
        self.written = {name: self.part(name, self.call).clone() for name in names if call.get(name) is not None}

    def part(self, name: str, call: Call) -> Tensor:
        x: Tensor = call[name]
        return x.index_select(0, self.rows[name].to(x.device)) if name in self.rows else x

    def copied(self, name: str, x: Tensor) -> Tensor:
        if name not in self.rows:
            return x.cpu()
        storage = torch.UntypedStorage(x.nbytes)  # which no mode of torch fills
        copy = torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape)  # type: ignore[call-overload]
        return copy.index_copy_(0, self.rows[name], self.part(name, self.original).cpu())

    def run(self) -> None:
        self.results = self.overload(**self.call)

    def problem(self, results: Any) -> str | None:
        """Returns what is wrong with the device's results and what it wrote: see `problem_of`."""
        names = [each.name or "result" for each in self.overload._schema.returns]
        compared: list[Any] = [*zip(names, tree_leaves(results), tree_leaves(self.results), strict=False)]
        for name, before in self.written.items():
            compared.append((name, self.part(name, self.original), self.part(name, self.call), before))
        problems = [problem_of(name, x.cpu(), *others) for name, x, *others in compared if x.numel()]
        return next((each for each in problems if each != ""), "")

    def write_back(self) -> Any:
        """Writes what the CPU's kernel wrote, and returns its results on the device."""
        device = next(x.device for x in self.original.values() if isinstance(x, Tensor) and x.device.type != "cpu")
        for name in self.written:
            x, value = self.original[name], self.part(name, self.call).to(device)
            if name in self.rows:
                x.index_copy_(0, self.rows[name].to(device), value)
            else:
                x.copy_(value)
        return tree_map_only(Tensor, lambda x: x.to(device), self.results)


def problem_of(name: str, result: Tensor, expected: Tensor, before: Tensor | None = None) -> str | None:
    """Returns what is wrong with `result`, or "". Elements that were NaN `before` and still are were not written.

    It looks for a wrong head, row or factor: rounding to 16 bits gives errors of up to 1e-2. Returns None if the CPU's
    kernel computed NaN or an infinity, since where one spreads depends on the algorithm.
    """
    same = (result == expected) | (result.isnan() & expected.isnan() & (before is not None and before.isnan()))
    if not result.is_floating_point():
        changed = ~same if before is None else (result != before) | (expected != before)
        share = (~same).sum().item() / max(1, same.numel() if before is None else int(changed.sum()))
        return f"{name}: {share:.0%} of the integers differ" if share > LARGEST_SHARE else ""
    if not (expected.isfinite() | same).all():
        return None
    if not (result.isfinite() | same).all():
        return f"{name}: NaN or infinite where the CPU's kernel has numbers"
    expected = expected.float().nan_to_num(0, 0, 0)
    sizes, difference = (pieces(x) for x in (expected, torch.where(same, 0, result.float() - expected)))
    error = (difference / sizes.maximum(sizes.square().mean().sqrt())).nan_to_num(0, torch.inf).max().item()
    return f"{name}: error {error:.3g}, expected at most {LARGEST_ERROR}" if error > LARGEST_ERROR else ""


def pieces(x: Tensor) -> Tensor:
    """Returns the norm of each piece."""
    flat = x.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % PIECE)).view(-1, PIECE).norm(dim=-1)
