"""Writes docs/lab/second-machine.md from a run's findings."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

MOST_CONFLICTS = 0.05
# For each kernel, why it has conflicts here. The longest matching beginning of a name counts. TEXT explains the words.
REASONS = {
    "aura_decode": "data",
    "aura_encode": "data",
    "aura_encode_half_3": "bytes",
    "aura_flash_p1": "data",
    "aura_flash_p1_matrix": "quarters, halves",
    "aura_flash_p1_matrix_8": "quarters, halves, data",
    "aura_paged_attention": "quarters, data",
    "chunk_fwd_h": "halves",
    "chunk_fwd_intra": "halves",
    "chunk_fwd_o": "halves",
    "chunk_scaled_dot_kkt": "halves",
    "fused_chunk": "halves",
    "paged_attention_prefill_bfloat": "halves",
    "paged_attention_prefill_half_float": "quarters",
    "paged_attention_prefill_float_half": "halves",
    "recompute_w_u": "halves",
    "recompute_w_u_float_33_65_16": "halves, rows",
    "solve_tril_16": "rows",
}

TEXT = """\
# A second machine

The simulated device is our own work, so it may share our mistakes. As an independent check, the same shaders run on an
NVIDIA GPU. nvcc compiles their Metal source with a small `metal_stdlib`, after some replacements in the text
(`evidence/lab/cuda`). The launches were recorded when the host code ran on the simulated device.

- {kernels} kernels in {variants} variants gave the values below, in {cases} cases, on one {gpu} ({versions}).
- {wrong_calls} of the cases are wrong calls with indices or boundaries out of range. The kernels report each of these
  errors, and access no memory out of bounds.
- {too_far}
- This says nothing about Apple's compiler or about speed on a Mac.

Delete this page once reports of `python -m torch_gdn check` from Macs show the same for Apple's compiler and GPUs.

```bash
python -m evidence.proof --only cuda                       # with a GPU, nvcc and compute-sanitizer
python -m evidence.lab.cuda record launches.zip          # or in two steps: here, with the simulated device,
python -m evidence.lab.cuda run launches.zip found.json  # and on the GPU's machine, with a checkout and numpy
python -m evidence.lab.cuda page found.json              # writes this page
```

## Values

Each case runs twice, with threadgroup memory full of zeros and full of NaN. The results are bit-identical. The
error is the distance from float64. For each op, the table has the largest error of all cases:

{values}

## compute-sanitizer

Each tool first finds a planted fault. Then every case runs once. Memory that the host had not written stays unwritten,
so that `initcheck` notices a kernel that reads it.

{sanitizers}

## Times

The kernels run in one graph, with more buffers than the cache holds. The floor is the time that it takes to move the
fewest possible bytes at the rate of a copy within the device, {rate:.2f} TB/s:

{times}

The next table has the same cases with other projects' kernels, in the same run: FLA's Triton kernels, and MLX's
Metal kernels through the same `metal_stdlib` ({peer_versions}). Our goal is at most 1.2 times the better one for
decoding, and less than 1 times for linear layers:

{peers}

## Bank conflicts

The table has the share of accesses to threadgroup memory that bank conflicts add, for kernels with more than
{share:.0%}.
The figures come from the GPU's counters (Nsight Compute, one launch per kernel and element type). Each is that of the
worst variant:

{conflicts}

The reasons:

- *data*: the codes decide which word a lane reads. No layout avoids that.
- *bytes*: 3-bit codes are packed from bytes, and lanes read bytes 10 or 11 apart.
- *halves*, *quarters*: a lane reads 8 or 16 bytes of rows that lie 4 banks apart, and this GPU serves 16 or 8 lanes at
  a time. Over a whole simdgroup, as the simulated device counts, there is no conflict.
- *rows*: in chunks of 16, a simdgroup moves two rows of a triangle that the permutation of rows does not separate.

## What limits the kernels here

AURA's first pass with 4 query rows takes 38 us at 32,768 keys, and 32 us for each 32,768 keys more. It issues 10.8
instructions per code. Seven of them are necessary: four multiply-adds, a load from the table of centroids with its
shift and mask. All 10.8 take 22 us if no scheduler ever waits, and memory takes 11.5 us. The rest is waiting, because
registers leave room for only four simdgroups per scheduler. These changes did not help, or not for every scheme:

- 128 blocks of keys take 40 us and 256 take 45 us, instead of 64 blocks.
- A lane that holds the codes of 2 or 8 keys at once instead of 4 takes 37 or 39 us, and with a trellis 38 or 42 us.
- Loading the next codes before decoding the current ones takes 36 us for `4v4` and 37 for `4v4t`, but 45 instead of
  41.5 for `3v3t`, whose registers spill.
- With that, advancing addresses by a step instead of multiplying takes 35 us for `4v4`, but 38 for `4v4t` and 45 to 57
  for `8v4`, which spill.

With 8 rows the pass multiplies 8 x 8 matrices, and takes 86 us. On this GPU, 24 shuffles emulate each product. Without
the shuffles the pass takes 55 us, but its values are wrong.

`quantized_linear` issues 6.7 instructions per code of 4 bits for one row of x. Decoding takes 2.5 of them: two codes
need two logical instructions, a multiply-add of halves, and two conversions, which on Apple's GPUs are part of the
product. For 8,192 x 8,192, all instructions take about 14 us, and memory accesses 12.5 us. We tried three changes, and
each made it slower: loading the next codes before the products, 8 rows per simdgroup, and 2 or 4 simdgroups for the
columns of the same rows. With 8 rows of x, the multiply-adds of the product alone take about 17 us.

A threadgroup of the experts' kernels runs a chain of dependent steps: find the expert, load codes, multiply, add up.
For gate and up of 8 tokens, two threadgroups of 256 threads per core take 57 us, and one of 512 threads takes 68 us.

Decoding one sequence is a chain of dependent steps: find the sequence and its state, load S, sum over K, store.
FLA's kernel is compiled for a call without packed sequences, slots and checkpoints. Ours looks for them at run
time, which takes a tenth to a fifth of the time for 64 sequences.

## What it cannot show

- It tells us nothing about Apple's compiler, registers and clocks, or about bank conflicts on Apple's GPUs. A time here
  is only a hint if Apple's GPUs have the same cause, such as dependent loads, narrow loads, or too few threadgroups.
- It cannot show the speed of prefill, because shuffles emulate the 8 x 8 matrices here.
- It cannot find a missing barrier that matters only with a weaker memory order than NVIDIA's.
"""


def table(titles: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, ["---"] * len(titles), *rows))


def values_table(found: dict[str, Any]) -> str:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in found["values"]:
        groups[row["case"].split()[0]].append(row)
    rows = []
    for group, members in sorted(groups.items()):
        worst = max(members, key=lambda row: row["error"])
        rows.append([f"`{group}`", f"{len(members)}", f"{worst['error']:.2e}", f"{worst['recorded']:.2e}"])
    return table(["op or algorithm", "outputs", "largest error", "of the same on the simulated device"], rows)


def too_far(found: dict[str, Any]) -> str:
    """Names outputs whose error exceeds the simulated device's by more than a quarter and 1e-6."""
    over = [row for row in found["values"] if not row["error"] <= row["bound"]]
    named = "; ".join(
        f"`{row['output']}` of `{row['case']}`, {row['error']:.1e} (there {row['recorded']:.1e})" for row in over
    )
    if not over:
        return "No error exceeds the simulated device's by more than a quarter, or by more than 1e-6."
    return f"These errors exceed the simulated device's by more than a quarter and 1e-6: {named}."


def sanitizers_table(found: dict[str, Any]) -> str:
    measured = found.get("sanitizers", ())
    if not measured:
        return left_out(found)
    if all(row["errors"] == 0 for row in measured):
        tools = ", ".join(f"`{row['tool']}`" for row in measured)
        return f"Findings of {tools}: none."
    rows = [[f"`{row['tool']}`", f"{row['errors']}", "; ".join(row["places"]) or "-"] for row in measured]
    return "They find:\n\n" + table(["tool", "findings", "where"], rows)


def times_table(found: dict[str, Any]) -> str:
    rows = []
    for row in found["times"]:
        parts = ", ".join(f"`{name}` {us:.1f}" for name, us in row["kernels"].items())
        share = f"{row['microseconds'] / row['floor']:.2f}"
        rows.append([row["case"], f"{row['microseconds']:.1f}", f"{row['floor']:.1f}", share, parts or "-"])
    return table(["case", "us", "floor, us", "times the floor", "kernels by themselves, us"], rows)


def peers_table(found: dict[str, Any]) -> str:
    """Compares our kernels with the fastest other kernel for the same case."""
    ours = {row["case"]: row["microseconds"] for row in found["times"]}
    others: dict[str, list[dict[str, Any]]] = {}
    for row in found.get("peers", ()):
        others.setdefault(row["case"], []).append(row)
    rows = []
    for case, theirs in others.items():
        if case not in ours:
            continue
        best = min(row["microseconds"] for row in theirs)
        each = ", ".join(f"{row['peer']} {row['microseconds']:.1f}" for row in theirs)
        rows.append([case, f"{ours[case]:.1f}", each, f"{ours[case] / best:.2f}"])
    return table(["case", "us", "others, us", "times the better"], rows) if rows else left_out(found)


def conflicts_table(found: dict[str, Any]) -> str:
    measured = found.get("conflicts", ())
    if not measured:
        return left_out(found)
    worst: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # loads and stores
    for row in measured:
        known = [prefix for prefix in REASONS if row["kernel"].startswith(prefix)]
        shares = worst[max(known, key=len, default=row["kernel"])]
        shares[:] = max(shares[0], row["loads"]), max(shares[1], row["stores"])
    rows = [
        [f"`{kernel}`", f"{loads:.0%}", f"{stores:.0%}", REASONS.get(kernel, "not known")]
        for kernel, (loads, stores) in sorted(worst.items(), key=lambda each: -max(each[1]))
        if max(loads, stores) > MOST_CONFLICTS
    ]
    names = "kernels whose names begin with"
    return table([names, "loads", "stores", "reason"], rows) + f"\n\n{len(measured)} kernel variants were measured."


def left_out(found: dict[str, Any]) -> str:
    return "Not measured: " + ("; ".join(found["left_out"]) or "this part was not run") + "."


def text(found: dict[str, Any]) -> str:
    tables = {"values": values_table(found), "sanitizers": sanitizers_table(found), "times": times_table(found)}
    tables |= {"peers": peers_table(found), "conflicts": conflicts_table(found)}
    tables["too_far"] = too_far(found)
    facts = {name: found[name] for name in ("gpu", "versions", "kernels", "variants", "cases", "wrong_calls")}
    facts["peer_versions"] = ", ".join(found.get("peer_versions", ())) or "versions unknown"
    return TEXT.format(**facts, **tables, rate=found["copy_rate"] / 1e12, share=MOST_CONFLICTS)
