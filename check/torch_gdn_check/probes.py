"""Probes each assumption about Metal, an Apple GPU or PyTorch's stream that the kernels rely on, by one tiny kernel.

A probe's shader is in the folder shaders. The library of the ops' kernels compiles it, with the same options,
and the same encoder launches it. The CPU judges what a probe measured.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_gdn import _C
from torch_gdn._recorder import Launch, recording
from torch_gdn_check.facts import memory_bytes
from torch_gdn_check.steps import Outcome, Skipped

SHADERS = Path(__file__).parent / "shaders"
LANES = 32
BUFFERS = 31  # Metal's limit per kernel
BLOCK_BYTES = 4096  # the most that setBytes takes
THREADGROUP_BYTES = 32768
LARGE = 1 << 32  # bytes that a 32-bit index cannot tell apart
Measured = tuple[dict[str, Any], str]  # what was measured, and what is wrong with it, if anything


@dataclass(frozen=True)
class Probe:
    name: str
    assumption: str
    needed_for: str
    measure: Callable[[torch.device], Measured]


def check_probe(device: torch.device, name: str) -> Outcome:
    probe = PROBES[name]
    about = {"assumption": probe.assumption, "needed_for": probe.needed_for}
    measured, problem = probe.measure(device)
    described = f"{probe.assumption}: does not hold: {problem}. Needed for {probe.needed_for}" if problem else ""
    return Outcome(about | {"measured": measured}, described)


def launches(device: torch.device) -> list[Launch]:
    """Records what all probes launch and runs nothing."""
    with recording() as recorded:
        for probe in PROBES.values():
            probe.measure(device)
    return recorded.launches


def run(
    kernel: str,
    arguments: Sequence[object],
    bindings: Sequence[Tensor | bytes | str],
    threadgroups: int = 1,
    threads: int = LANES,
) -> None:
    """Launches probe_<name> of a shader. `kernel` is <shader>/<name>."""
    shader, name = kernel.split("/")
    words = [str(each) for each in arguments]
    _C.launch(f"probe_{name}", str(SHADERS / f"{shader}.metal"), words, list(bindings), [threadgroups, 1, 1], threads)


def zeros(device: torch.device, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(sizes, dtype=dtype, device=device)


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))


def differing(result: Tensor, expected: Tensor) -> list[int]:
    """Returns at most 8 flat positions at which two tensors differ. Two NaN are equal."""
    result, expected = result.flatten().cpu(), expected.flatten()
    same = (result == expected) | (result.isnan() & expected.isnan())
    return [int(each) for each in (~same).nonzero().flatten()[:8]]


def positions(result: Tensor, expected: Tensor, what: str) -> str:
    wrong = differing(result, expected)
    return f"{what} differs at {wrong}" if wrong else ""


def first_problem(*problems: str) -> str:
    return next(filter(None, problems), "")


# Simdgroups


def matrix_layout(device: torch.device) -> Measured:
    """Measures the positions that lane_position() of shaders/core/fragment.h assumes."""
    elements = zeros(device, LANES, 2)
    run("matrix/matrix_layout", ["float"], [torch.arange(64.0, device=device), elements])
    lane = torch.arange(LANES)
    row, column = lane // 16 * 4 + lane // 2 % 4, lane // 8 % 2 * 4 + lane % 2 * 2
    first = 8 * row + column
    expected = torch.stack([first, first + 1], dim=1).float()
    result = elements.cpu()
    return {"elements": result.int().tolist()}, positions(result, expected, "8 * row + column of a lane's elements")


def matrix_product(device: torch.device) -> Measured:
    left, right = ((16 * random(64 * seed)[-64:]).round().view(8, 8) for seed in (1, 2))
    product = zeros(device, 8, 8)
    run("matrix/matrix_product", ["float"], [left.to(device), right.to(device), product])
    return {}, positions(product, left @ right, "the product of two matrices of small integers")


def simdgroups(device: torch.device) -> Measured:
    threads = 128
    places = zeros(device, threads, 3, dtype=torch.int32)
    run("simdgroup/simdgroups", [threads], [places], threads=threads)
    thread = torch.arange(threads, dtype=torch.int32)
    expected = torch.stack([thread % LANES, thread // LANES, torch.full_like(thread, LANES)], dim=1)
    result = places.cpu()
    measured = {"lanes": result[:, 2].unique().tolist()}
    facts = [each for each in _C.pipelines() if each["name"] == f"probe_simdgroups_{threads}"]
    measured["thread_execution_width"] = [each["thread_execution_width"] for each in facts]
    return measured, positions(result, expected, "lane, simdgroup and number of lanes of a thread")


def shuffles(device: torch.device) -> Measured:
    floats, integers = zeros(device, 5, LANES), zeros(device, 6, LANES, dtype=torch.int32)
    run("simdgroup/shuffles", [LANES], [floats, integers])
    lane = torch.arange(LANES, dtype=torch.int32)
    value = 10 + 3 * lane
    total = value.sum(dtype=torch.int32).expand(LANES)
    moved = {"simd_shuffle": value.flip(0), "simd_shuffle_xor": value[(lane ^ 5).long()]}
    moved |= {"simd_shuffle_up": value[(lane - 1).clamp(min=0).long()], "simd_sum": total}
    expected = {
        "float": [*moved.items(), ("simd_max", value.max().expand(LANES))],
        "int": [
            *moved.items(),
            ("simd_min", value.min().expand(LANES)),
            ("simd_prefix_exclusive_sum", value.cumsum(0, dtype=torch.int32) - value),
        ],
    }
    wrong = []
    for kind, results in (("float", floats.cpu()), ("int", integers.cpu())):
        for (name, wanted), result in zip(expected[kind], results, strict=True):
            first = 1 if name == "simd_shuffle_up" else 0  # a lane that no other shifts to has no defined value
            if differing(result[first:].int(), wanted[first:]):
                wrong.append(f"{name} of {kind}")
    return {"wrong": wrong}, f"wrong results of {', '.join(wrong)}" if wrong else ""


# Arithmetic

# Bounds come from the section "Relative Error as ULPs" of the Metal Shading Language Specification; 0.5 means correctly
# rounded. gate_exp is our own (shaders/core/exponential.h).
MOST_ULPS = {"exp": 4.0, "gate_exp": 1.0, "log": 4.0, "rsqrt": 0.5, "sqrt": 0.5, "reciprocal": 0.5}


def ulps(result: Tensor, exact: Tensor) -> float:
    """Returns the largest distance, in units of the last place of the exact value in f32."""
    _, exponent = torch.frexp(exact)
    unit = torch.ldexp(torch.ones_like(exact), (exponent - 24).clamp(min=-149))
    return float(((result.double() - exact).abs() / unit).max())


def function_inputs() -> Tensor:
    """Returns 2^16 numbers whose exp is a normal f32: evenly spaced from -86 to 86, and small ones of both signs."""
    even = torch.linspace(-86, 86, 1 << 15)
    small = torch.ldexp(random(1 << 15).sign(), torch.linspace(-20, 6, 1 << 15))
    return torch.cat([even, small]).float()


def functions(device: torch.device) -> Measured:
    x = function_inputs()
    results = zeros(device, len(MOST_ULPS), x.numel())
    count = struct.pack("i", x.numel())
    run("arithmetic/functions", ["float"], [x.to(device), results, count], threadgroups=x.numel() // 256, threads=256)
    wide, size = x.double(), x.double().abs()
    exact = (wide.exp(), wide.exp(), size.log(), size.rsqrt(), size.sqrt(), size.reciprocal())
    measured = {
        name: ulps(result, wanted) for name, result, wanted in zip(MOST_ULPS, results.cpu(), exact, strict=True)
    }
    # float64's own rounding is 2e-9 of an ulp.
    wrong = [
        f"{name} is {measured[name]:.3g} ulp off"
        for name, most in MOST_ULPS.items()
        if not measured[name] <= most + 1e-6
    ]
    return {"ulps": measured, "most": MOST_ULPS}, ", ".join(wrong)


def product_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Returns inputs whose x y + z is at most 2^-24 if rounded once, and 0 if the product is rounded first."""
    x = 1 + torch.arange(1, LANES + 1) * 2.0**-13
    y = 1 + torch.arange(LANES, 0, -1) * 2.0**-14
    return x, y, -(x * y)


def products(device: torch.device) -> Measured:
    x, y, z = product_inputs()
    results = zeros(device, 3, LANES)
    run("arithmetic/products", ["float"], [*(each.to(device) for each in (x, y, z)), results])
    fused, written_out, quotient = results.cpu()
    exact = (x.double() * y.double() + z.double()).float()
    assert exact.count_nonzero() > LANES // 2
    contracted = not differing(written_out, exact)
    never = not differing(written_out, torch.zeros(LANES))
    measured = {"contracted": "always" if contracted else "never" if never else "sometimes"}
    return measured, first_problem(
        positions(fused, exact, "fma(x, y, z) against the exact value rounded once"),
        positions(quotient, (x.double() / y.double()).float(), "x / y against the exact quotient rounded once"),
        "" if contracted else f"x * y + z is contracted {measured['contracted']}",
    )


def safe_math(device: torch.device) -> Measured:
    """Compares f32 on the device with the CPU. Fast math would make them differ."""
    x = torch.cat([random(26), torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-3, 1.0, -1e-3])])
    y = torch.full((LANES,), 1e8)
    results = zeros(device, 5, LANES)
    run("arithmetic/safe_math", ["float"], [x.to(device), y.to(device), results])
    expected = torch.stack([(x + y) - y, x - x, x.isnan().float(), (x == x).float(), x * 0])
    names = ("(x + y) - y", "x - x", "isnan(x)", "x == x", "x * 0")
    wrong = [name for name, row, wanted in zip(names, results.cpu(), expected, strict=True) if differing(row, wanted)]
    return {
        "wrong": wrong
    }, f"{', '.join(wrong)} computed as if no number were NaN, infinite or rounded" if wrong else ""


def convert(device: torch.device, dtype: str, stored: Tensor, wide: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    widened, narrowed = zeros(device, LANES), zeros(device, LANES, dtype=stored.dtype)
    run(
        "arithmetic/conversions",
        [dtype],
        [stored.to(device), wide.to(device), widened, narrowed, struct.pack("f", factor)],
    )
    return widened.cpu(), narrowed.cpu()


TYPES = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}


def denormals(device: torch.device) -> Measured:
    """Tests reading (a stored denormal times 2^k) and writing (a normal number divided by 2^k)."""
    measured, problem = {}, ""
    for name, dtype in TYPES.items():
        k = 10 if dtype == torch.float16 else 100
        smallest = torch.finfo(dtype).smallest_normal
        stored = (torch.arange(1, LANES + 1) * (smallest / 128)).to(dtype)
        exact = stored.double() * 2.0**k
        widened, narrowed = convert(device, name, stored, exact.float(), 2.0**k)
        for way, result, kept in (("read", widened.double(), exact), ("written", narrowed.double(), stored.double())):
            is_kept, is_zero = torch.equal(result, kept), not result.any()
            measured[f"{name} {way}"] = "kept" if is_kept else "flushed" if is_zero else "neither"
            allowed = ("kept",) if dtype == torch.float16 else ("kept", "flushed")
            if measured[f"{name} {way}"] not in allowed:
                problem = problem or f"denormals of {name} that are {way}: {measured[f'{name} {way}']}"
    return measured, problem


def rounding(device: torch.device) -> Measured:
    """Compares ties, both neighbours of a tie, overflow, infinities and NaN with PyTorch's conversion on the CPU."""
    special = [float("nan"), float("inf"), -float("inf"), -0.0, 3.4e38, -3.4e38, 65519.0, 65520.0]
    wrong = []
    for name in ("half", "bfloat"):
        bits = 11 if name == "half" else 8
        ties = 1 + (2 * torch.arange(8) + 1) * 2.0**-bits
        wide = torch.cat([torch.tensor(special), ties, ties + 2.0**-23, ties - 2.0**-23]).float()
        narrow = wide.to(TYPES[name])
        _, result = convert(device, name, narrow, wide, 1.0)
        if differing(result.float(), narrow.float()):
            wrong.append(name)
    return {"wrong": wrong}, f"f32 to {', '.join(wrong)} is not rounded to nearest, ties to even" if wrong else ""


# Memory


def many_buffers(device: torch.device) -> Measured:
    values = torch.arange(float((BUFFERS - 1) * LANES)).view(BUFFERS - 1, LANES)
    copy = zeros(device, LANES, BUFFERS - 1)
    run("memory/many_buffers", ["float"], [*(row.to(device) for row in values), copy])
    return {"buffers": BUFFERS}, positions(copy.cpu().T.contiguous(), values, "a copy of 30 buffers")


def parameter_block(device: torch.device) -> Measured:
    words = torch.arange(BLOCK_BYTES // 4, dtype=torch.int32) * 3 + 1
    copy = zeros(device, words.numel(), dtype=torch.int32)
    run("memory/block", [words.numel()], [words.numpy().tobytes(), copy])
    return {"bytes": BLOCK_BYTES}, positions(copy, words, "a copy of the block")


def host_array(device: torch.device) -> Measured:
    x = torch.arange(float(BLOCK_BYTES // 4))
    copy = zeros(device, x.numel())
    run("memory/increment", ["float"], [x.numpy().tobytes(), copy], threadgroups=x.numel() // LANES)
    return {"bytes": BLOCK_BYTES}, positions(copy, x + 1, "what was read of the array, and 1,")


def offsets(device: torch.device) -> Measured:
    wrong = []
    for name in ("half", "bfloat", "float"):
        x = torch.arange(2 * LANES + 1, dtype=TYPES[name])
        on_device, copy = x.to(device), zeros(device, 2 * LANES + 1, dtype=TYPES[name])
        run("memory/increment", [name], [on_device[1 : 1 + LANES], copy[1 : 1 + LANES]])
        expected = torch.zeros_like(x)
        expected[1 : 1 + LANES] = x[1 : 1 + LANES] + 1
        if differing(copy, expected):
            wrong.append(x.element_size())
    return {"bytes": [2, 4]}, f"wrong elements at an offset of {wrong} bytes" if wrong else ""


def two_views(device: torch.device) -> Measured:
    both = torch.arange(float(3 * LANES)).to(device)
    run("memory/increment", ["float"], [both[:LANES], both[2 * LANES :]])
    expected = torch.cat([torch.arange(float(2 * LANES)), torch.arange(1.0, 1 + LANES)])
    return {}, positions(both, expected, "the second view")


def order(device: torch.device) -> Measured:
    count = 64
    views = zeros(device, LANES), zeros(device, LANES)
    for i in range(count):
        run("memory/increment", ["float"], [views[i % 2], views[(i + 1) % 2]])
    return {"launches": count}, positions(views[count % 2], torch.full((LANES,), float(count)), "a count of launches")


def wide_grid(device: torch.device) -> Measured:
    groups = (1 << 16) + 1
    x, y = (zeros(device, groups * LANES, dtype=torch.float16) for _ in range(2))
    run("memory/increment", ["half"], [x, y], threadgroups=groups)
    result = int(y.sum(dtype=torch.float32))
    return {"threadgroups": groups}, "" if result == groups * LANES else f"{result} of {groups * LANES} threads ran"


def large_buffer(device: torch.device) -> Measured:
    size, index, value = LARGE + 4096, LARGE + 5, 77
    memory, limits = memory_bytes(), _C.device_facts()
    if memory < 3 * size or limits["max_buffer_length"] < size or limits["recommended_max_working_set_size"] < 2 * size:
        raise Skipped(f"a buffer of {size} bytes is too much for a machine with {memory}")
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    run("memory/large_buffer", [value], [buffer, struct.pack("q", index)])
    result = [int(buffer[at].cpu()) for at in (index, index - LARGE)]
    return {"bytes": size}, "" if result == [value, value + 1] else f"{result} at {index} and 2^32 before"


def threadgroup_memory(device: torch.device) -> Measured:
    words = THREADGROUP_BYTES // 4
    copy = zeros(device, words, dtype=torch.int32)
    run("memory/threadgroup_memory", [words], [copy], threads=256)
    expected = 3 * torch.arange(words - 1, -1, -1, dtype=torch.int32)
    return {"bytes": THREADGROUP_BYTES}, positions(copy, expected, "what the threads opposite wrote")


def gpu_clock(device: torch.device) -> Measured:
    x, y = zeros(device, 1024 * LANES), zeros(device, 1024 * LANES)
    torch.mps.synchronize()
    start = time.perf_counter()
    for _ in range(16):
        run("memory/increment", ["float"], [x, y], threadgroups=1024)
    on_gpu = _C.wait_and_time()
    waited = time.perf_counter() - start
    measured = {"seconds on the GPU": on_gpu, "seconds until it was done": waited}
    return measured, "" if 0 < on_gpu <= waited else f"{on_gpu} s of work were done after {waited:.3g} s"


def error_log(device: torch.device) -> Measured:
    run("memory/error", [42], ["errors", b"probe".ljust(40, b"\0")])
    raised = ""
    try:
        torch.mps.synchronize()
    except RuntimeError as error:
        raised = str(error)
    torch.mps.synchronize()  # must not raise it again
    is_whole = "probe: x: expected nothing, got 42 at 7" in raised
    return {"raised": raised}, "" if is_whole else f"synchronize() raised {raised!r}"


STORED = "what is stored in bf16 and f16"
ALL = (
    Probe(
        "matrix layout",
        "lane l holds row l / 16 * 4 + l / 2 % 4 of an 8x8 matrix, columns c = l / 8 % 2 * 4 + l % 2 * 2 and c + 1",
        "every product of simdgroup matrices: the chunked kernels, attention's prefill, AURA's first pass",
        matrix_layout,
    ),
    Probe(
        "matrix product",
        "the product of two such matrices is exact for small integers",
        "the same",
        matrix_product,
    ),
    Probe(
        "simdgroup width",
        "a simdgroup is 32 consecutive threads of a threadgroup",
        "every kernel: rows, columns and tokens are divided among 32 lanes",
        simdgroups,
    ),
    Probe("shuffles", "each simd function that is used moves f32 and int32 as documented", "every kernel", shuffles),
    Probe(
        "functions",
        "exp, log, rsqrt, sqrt and division keep the accuracy of Metal's precise functions",
        "gates, norms, softmax and their bounds in f32",
        functions,
    ),
    Probe(
        "contraction", "fma rounds once, and x * y + z is contracted", "the bounds in f32, which assume it", products
    ),
    Probe(
        "safe math",
        "NaN and infinities are kept, and sums are not reordered",
        "resets of a state by g = -inf; NaN in an input stays visible",
        safe_math,
    ),
    Probe(
        "denormals",
        "denormals of f16 are kept; those of f32 and bf16 are kept or become 0",
        "values of f16 below 6e-5; decays below 1.2e-38",
        denormals,
    ),
    Probe("rounding", "f32 is rounded to bf16 and f16 to nearest, ties to even, and NaN stays NaN", STORED, rounding),
    Probe("31 buffers", "a kernel can have 31 buffers", "kernels with up to 24", many_buffers),
    Probe("parameter block", "setBytes takes 4,096 bytes", "parameter blocks of up to 768 bytes", parameter_block),
    Probe(
        "host array",
        "an argument in device space can be given by setBytes",
        "indices on the CPU, which are not copied to the device",
        host_array,
    ),
    Probe("buffer offsets", "a buffer can be bound at an offset of one element", "views of fused projections", offsets),
    Probe(
        "two views of a buffer",
        "two views of one buffer can be bound at once if they share no bytes",
        "q, k and v from one projection, and tensors that share an allocation of PyTorch",
        two_views,
    ),
    Probe("order", "launches of one encoder run in order, each seeing what the one before wrote", "every op", order),
    Probe("wide grid", "a grid can have more than 65,535 threadgroups", "long prompts and many sequences", wide_grid),
    Probe(
        "buffer above 4 GB", "a kernel reaches bytes past 2^32 of a buffer", "pools of states and pages", large_buffer
    ),
    Probe("threadgroup memory", "a threadgroup has 32 KB", "the chunked kernels", threadgroup_memory),
    Probe(
        "error log",
        "what a kernel writes to the stream's error log is raised once, at the next synchronisation",
        "errors that only the device can see: slots, boundaries, pages",
        error_log,
    ),
    Probe(
        "GPU clock",
        "GPUStartTime and GPUEndTime of the command buffer that PyTorch commits are the GPU's time",
        "the times that the report calls gpu_clock_us; no kernel",
        gpu_clock,
    ),
)
PROBES = {probe.name: probe for probe in ALL}
