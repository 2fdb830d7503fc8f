"""docs/lab/second-machine.md from a run's findings."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

MOST_CONFLICTS = 0.05
# Why a kernel has conflicts here, by what its name begins with, the longest first; the words are explained in TEXT.
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

The simulated device is ours, so its mistakes are ours too. Here the same shaders run on an NVIDIA GPU: their Metal
text goes to nvcc through a small `metal_stdlib` and a few changes of words (`lab/cuda`), and the launches are those
that the host code made on the simulated device, recorded with their parameters and with what the buffers held. So
another compiler, another scheduler and another maker's memory checkers judge the same kernels and the same host code.

This page can go once reports of `python -m torch_gdn.check` from Macs show the same for Apple's compiler and GPUs.

```bash
python -m proof --only cuda                       # where a GPU, nvcc and compute-sanitizer are, else left out
python -m lab.cuda record launches.zip          # in two steps: here, with the simulated device,
python -m lab.cuda run launches.zip found.json  # and there, with a checkout and numpy alone
python -m lab.cuda page found.json              # writes this page
```

{gpu}, {versions}: {kernels} kernels in {variants} variants, {cases} cases. {wrong_calls} of them are wrong calls, with
indices or boundaries outside what they index: kernels report each of them, and memcheck sees that they touch nothing
else.

## Values

Each case runs twice, with threadgroup memory full of zeros and full of NaN: the same bits. Errors are distances from
float64, the largest of an op's cases.

{values}

{too_far}

## compute-sanitizer

Each tool first finds a fault that is planted for it; then every case runs once, with no byte of a buffer written that
the host had not written.

{sanitizers}

## Times

Kernels in one graph, over more buffers than the cache holds. The floor is what any implementation must move, at the
rate of a copy within the device, {rate:.2f} TB/s.

{times}

The same cases with other projects' kernels, in the same run: FLA's Triton kernel, and MLX's Metal kernels through the
same `metal_stdlib` ({peer_versions}). We want at most 1.2 times the better one for decoding, and less than 1 for linear
layers.

{peers}

## Bank conflicts

Of wavefronts to threadgroup memory those that only conflicts cost, by the GPU's counters (Nsight Compute, one launch a
kernel and element type): kernels with more than {share:.0%}.

{conflicts}

The reasons are from Nsight Compute's counts of each instruction for AURA's kernels and `chunk_fwd_intra` in float, and
from the layouts and the simulated device's own counts for the others:

- *data*: which word a lane reads is what the codes say, a centroid or the next boundary of a search among them; no
  layout spreads 256 of them over 32 banks for every row. The simulated device counts these too.
- *bytes*: 3-bit codes are packed from bytes, and lanes read bytes 10 or 11 apart of several rows; counted there too.
- *halves*: 8 bytes a lane of an 8 x 8 fragment, or of staged rows, whose rows lie 4 banks apart, so that reads of the
  transposed fragment, 4 bytes a lane, are in 32 banks. A simdgroup's 64 words then hit each bank twice, the least there
  is, and the simulated device counts no conflict. This GPU serves 16 lanes at a time, four rows, of which neighbours
  share half their banks. Rows 8 banks apart would suit it, and cost the transposed reads twice as much on both.
- *quarters*: 16 bytes a lane in the same rows, or 32 in two stores; this GPU serves 8 lanes at a time. Over a whole
  simdgroup there is no conflict.
- *rows*: in chunks of 16 a simdgroup moves two of a triangle's rows, which their permutation does not tell apart, or
  four of 8 columns; in longer ones it does not. The simulated device counts these too.

## What it led to

- Decode with [K, V] states loaded S between barriers, eight scalars in flight a thread: 19, 42 and 301 us at B 1, 8 and
  64. Then all loads were issued first, four values each: 7.5, 18 and 124, and 6.5, 17 and 116 with [V, K].
- Of that, by the samples of Nsight Compute at B 64, a thread spent 28 % to 31 % on reads that waited for one another
  behind S: q, then k, then v, then g and beta. Now each thread reads the first values that it stages before S, in the
  types they are stored in: the table above.
- AURA's second pass looped over its blocks in 8 threadgroups: 20 us. Now four simdgroups share them, four loads at
  once.
- AURA's first pass read the codes of four values a thread between uses, for a column of its own: 152 us. Now a thread
  has 4 columns and 4 to 8 keys' codes in flight: 67 us. With blocks of 512 keys, twice the threadgroups, it takes 50:
  256 are two for each of this GPU's multiprocessors.
- Triangles and tiles of 64-byte rows had two to four rows on one bank: rows are permuted.
- Rows of S lay 2 banks apart on their way through threadgroup memory, a conflict on the simulated device too. Now pairs
  of a row's elements are exchanged by the key: four rows of a fragment are in 32 banks. Of the wavefronts of stores
  conflicts had cost 50 % to 56 % in `chunk_fwd_h`, 27 % to 36 % in `fused_chunk_gated_delta_rule` and 13 % in
  `fused_chunk_kda`: the table above has what is left.
- `chunk_fwd_o` reads pairs of q and of the scores, not one element after the other: on the simulated device a third of
  its bank cycles in float32 were conflicts, and none are. Here it gained nothing (41 % of loads and 6 % of stores
  before in float32, 12 % and 11 % in bfloat16), for the reason *halves*.
- The state of `golden fused_chunk strong_gate` was off by 2.6e-06 here, and by 8.0e-07 on the simulated device. A
  token's share of the state is exp of a difference of two running sums of log decays, which reach -153 in a chunk of
  16; `simd_prefix_inclusive_sum` adds in an order of the device's own, here that of a tree, whose sums are rounded
  apart, and the simulated device's was one lane after the other. `-fmad=false` changed no digit; sums one after the
  other gave 8.0e-07. Now the shaders add in that order themselves, `chunk_fwd_intra` too, and the simulated device's
  perturbing mode takes such sums in any order. The cases of both kernels with K and V of 128, or 33 and 65, T 75, and
  the golden ones named `base_k128`, `varlen_k128` and `strong_gate` were run again; since then everything was.

## What binds

AURA's first pass at 32,768 keys, 68 us where 17 were wanted (`ncu --set full` on the launch of the timed case): it
issues 23,266 instructions a simdgroup, 8,432 of them the products themselves, and reads threadgroup memory in 4.9
million wavefronts, 16-byte rows of q and of weights and single centroids, without a conflict. At the GPU's 1.98 GHz the
instructions alone take 23 us, the wavefronts 19, where memory would take 8.5: the GPU has 7.9 f32 products for a byte
that it copies, and 4-bit codes of four query heads need 7.5 with no instruction beside them. 2 times the floor is out
of reach without matrix units. The rest is waiting, with 8 simdgroups a multiprocessor. What was tried, in us of the
pass:

| design | us |
| --- | --- |
| as it is, blocks of 1,024 keys: 256 threadgroups | 68 |
| blocks of 512, 256 and 128 keys | 50, 52, 57 |
| codes of the values read before the scores are computed; and with blocks of 512 | 60, 46 |
| codes of 16 and of 32 keys at once, not 8 | 63, 60 |
| at most 64 registers a thread, not 128; and with blocks of 256 | 75, 48 |
| in part: centroids by arithmetic, not from a table | 64 |
| in part: no softmax; no scores; no values; no scores and no values | 65, 45, 42, 12 |

The smaller blocks are right for this GPU's 132 multiprocessors and left to `block_size`; the earlier reads cost 32
registers at D 128, and more above it, for a tenth.

Decode: at B 1 all threadgroups run at once, and what takes the time is a chain that no other work hides: where the
sequence and its state lie, S, the sums over K, the store. FLA's kernel is compiled for a call without packed sequences,
slots and checkpoints; ours looks for them when it runs, a tenth to a fifth of the samples at B 64. At most 4
threadgroups of 128 registers a thread fit a multiprocessor, and fewer registers spill: before the change 122 us with
[K, V] and 126 with [V, K] at 80, 151 and 160 at 64.

## What it cannot show

- Apple's compiler, registers and clocks; a time here is a hint where its reason (loads in a row, their width, too few
  threadgroups) is not NVIDIA's, and no more.
- Anything of prefill's speed: 8 x 8 matrices are emulated by shuffles here, so those kernels are not timed.
- Bank conflicts as Apple's GPUs have them: their banks are not documented. The simulated device counts 32 banks of 4
  bytes for whole simdgroups, NVIDIA's serve 8 bytes a lane in two halves and 16 in four.
- Memory orders weaker than NVIDIA's: a barrier that nothing needed here may be one that Metal's rules ask for.
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
    """Outputs above their bar: a quarter more than the simulated device's error, and 1e-6."""
    over = [row for row in found["values"] if not row["error"] <= row["bound"]]
    named = "; ".join(
        f"`{row['output']}` of `{row['case']}`, {row['error']:.1e} (there {row['recorded']:.1e})" for row in over
    )
    return f"Above the bar of a quarter more than there, and 1e-6, {'is ' + named if over else 'is none'}."


def sanitizers_table(found: dict[str, Any]) -> str:
    measured = found.get("sanitizers", ())
    if not measured:
        return left_out(found)
    rows = [[f"`{row['tool']}`", f"{row['errors']}", "; ".join(row["places"]) or "-"] for row in measured]
    return table(["tool", "findings", "where"], rows)


def times_table(found: dict[str, Any]) -> str:
    rows = []
    for row in found["times"]:
        parts = ", ".join(f"`{name}` {us:.1f}" for name, us in row["kernels"].items())
        share = f"{row['microseconds'] / row['floor']:.2f}"
        rows.append([row["case"], f"{row['microseconds']:.1f}", f"{row['floor']:.1f}", share, parts or "-"])
    return table(["case", "us", "floor, us", "times the floor", "kernels by themselves, us"], rows)


def peers_table(found: dict[str, Any]) -> str:
    """Our kernels compared with the fastest other kernel for the same case."""
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


def reason(kernel: str) -> str:
    known = [prefix for prefix in REASONS if kernel.startswith(prefix)]
    return REASONS[max(known, key=len)] if known else "not known"


def conflicts_table(found: dict[str, Any]) -> str:
    measured = found.get("conflicts", ())
    if not measured:
        return left_out(found)
    rows = [
        [f"`{row['kernel']}`", f"{row['loads']:.0%}", f"{row['stores']:.0%}", reason(row["kernel"])]
        for row in sorted(measured, key=lambda row: -max(row["loads"], row["stores"]))
        if max(row["loads"], row["stores"]) > MOST_CONFLICTS
    ]
    return table(["kernel", "loads", "stores", "reason"], rows) + f"\n\n{len(measured)} kernel variants were measured."


def left_out(found: dict[str, Any]) -> str:
    return "Not measured: " + ("; ".join(found["left_out"]) or "this part was not run") + "."


def text(found: dict[str, Any]) -> str:
    tables = {"values": values_table(found), "sanitizers": sanitizers_table(found), "times": times_table(found)}
    tables |= {"peers": peers_table(found), "conflicts": conflicts_table(found)}
    tables["too_far"] = too_far(found)
    facts = {name: found[name] for name in ("gpu", "versions", "kernels", "variants", "cases", "wrong_calls")}
    facts["peer_versions"] = ", ".join(found.get("peer_versions", ())) or "versions unknown"
    return TEXT.format(**facts, **tables, rate=found["copy_rate"] / 1e12, share=MOST_CONFLICTS)
