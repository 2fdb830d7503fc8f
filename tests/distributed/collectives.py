"""The checks of test_collectives.py, which each of three processes runs:

    python collectives.py RANK SIZE ADDRESS BACKEND

A check is a function whose name begins with check_. It compares with exact numbers. Prints the outcomes as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import Shard, distribute_tensor

import torch_gdn.distributed
from tests.helpers.devices import on_a_mac
from torch_gdn.distributed import Copies

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
DTYPES = (*FLOATS, *INTEGERS, torch.uint64, torch.bool, torch.complex64)
NUMBERS = ([1, 2, 5, 0], [3, 0, 4, 1], [2, 2, 6, 1])  # of each process
EXPECTED = {
    "SUM": [6, 4, 15, 2],
    "PRODUCT": [6, 0, 120, 0],
    "MIN": [1, 0, 4, 0],
    "MAX": [3, 2, 6, 1],
    "BAND": [0, 0, 4, 0],
    "BOR": [3, 2, 7, 1],
    "BXOR": [0, 0, 7, 0],
    "AVG": [2, 4 / 3, 5, 2 / 3],
}
Op = dist.ReduceOp


def rank() -> int:
    return dist.get_rank()


def mine(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(NUMBERS[rank()]).to(dtype).to("mps")


def numbers(of: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(NUMBERS[of]).to(dtype)


def same(result: torch.Tensor, expected: Any) -> None:
    assert result.device.type == "mps", result.device
    expected = torch.as_tensor(expected).to(result.dtype)
    assert result.shape == expected.shape and torch.equal(result.cpu(), expected), (result.cpu(), expected)


def apart(*shape: int) -> torch.Tensor:
    """Returns zeros on mps that are not contiguous: columns, with others between them."""
    return torch.zeros(*shape[::-1], 2, device="mps")[..., 0].permute(*range(len(shape))[::-1])


def check_all_reduce_in_each_dtype() -> None:
    for dtype in DTYPES:
        x = mine(dtype)
        dist.all_reduce(x)
        same(x, torch.tensor(EXPECTED["SUM"]).to(dtype))


def check_all_reduce_with_each_op() -> None:
    for name, expected in EXPECTED.items():
        for dtype in (torch.float32, torch.bfloat16, *INTEGERS):
            if (dtype.is_floating_point and name in ("BAND", "BOR", "BXOR")) or (dtype in INTEGERS and name == "AVG"):
                continue
            x = mine(dtype)
            dist.all_reduce(x, getattr(Op, name))
            same(x, torch.tensor(expected).to(dtype))


def check_the_largest_integers() -> None:
    for dtype in INTEGERS:
        most = torch.tensor([torch.iinfo(dtype).max])
        x = (most * (rank() == 0)).to(dtype).to("mps")
        dist.all_reduce(x, Op.MAX)
        same(x, most.to(dtype))


def check_an_average_of_integers_drops_the_fraction() -> None:
    x = torch.tensor([-3, 5, 7], device="mps") - rank() ** 2
    dist.all_reduce(x, Op.AVG)
    same(x, [-4, 3, 5])
    x = torch.tensor([0, 0, rank()], device="mps") * 5
    dist.all_reduce(x, Op.AVG)
    same(x, [0, 0, 5])


def check_all_reduce_of_truths() -> None:
    truths = [[True, True, False], [True, False, False], [True, True, False]]
    for op, expected in (
        (Op.SUM, [True, True, False]),
        (Op.MAX, [True, True, False]),
        (Op.PRODUCT, [True, False, False]),
        (Op.MIN, [True, False, False]),
        (Op.BOR, [True, True, False]),
        (Op.BAND, [True, False, False]),
    ):
        x = torch.tensor(truths[rank()], device="mps")
        dist.all_reduce(x, op)
        same(x, expected)


def check_reductions_that_mean_nothing_are_refused() -> None:
    for x, op, name in (
        (torch.zeros(2, dtype=torch.bool, device="mps"), Op.AVG, "AVG"),
        *((mine(torch.uint64), getattr(Op, name), name) for name in ("MIN", "MAX", "AVG")),
    ):
        try:
            dist.all_reduce(x, op)
        except TypeError as error:
            assert str(error).startswith("all_reduce: op: expected ") and name in str(error), error
        else:
            raise AssertionError(f"{op} of {x.dtype} was taken")


def check_all_reduce_of_a_view() -> None:
    x = apart(4, 3)
    x += mine()[:, None]
    assert not x.is_contiguous()
    dist.all_reduce(x)
    same(x, torch.tensor(EXPECTED["SUM"])[:, None].expand(4, 3))


def check_all_reduce_of_nothing_and_of_a_number() -> None:
    dist.all_reduce(torch.zeros(0, 3, device="mps"))
    x = torch.tensor(float(rank()), device="mps")
    dist.all_reduce(x)
    same(x, 3.0)


def check_all_reduce_of_much() -> None:
    x = torch.arange(300_000, device="mps", dtype=torch.float32) % 1000 * (rank() + 1)
    dist.all_reduce(x)
    same(x, torch.arange(300_000) % 1000 * 6)


def check_all_reduce_coalesced() -> None:
    x, y = mine(), mine() * 2
    dist.all_reduce_coalesced([x, y])
    same(x, EXPECTED["SUM"])
    same(y, [2 * each for each in EXPECTED["SUM"]])


def check_broadcast_in_each_dtype() -> None:
    for dtype in (*DTYPES, torch.float8_e4m3fn):
        x = mine(dtype)
        dist.broadcast(x, 1)
        assert torch.equal(x.cpu().view(torch.uint8), numbers(1, dtype).view(torch.uint8)), dtype


def check_reduce_leaves_the_others_alone() -> None:
    x = mine()
    dist.reduce(x, 2)
    same(x, EXPECTED["SUM"] if rank() == 2 else NUMBERS[rank()])


def check_all_gather() -> None:
    for dtype in DTYPES:
        result = [torch.zeros(4, dtype=dtype, device="mps") for _ in NUMBERS]
        dist.all_gather(result, mine(dtype))
        for each, x in enumerate(result):
            same(x, numbers(each, dtype))


def check_all_gather_of_views() -> None:
    result = [apart(2, 2) for _ in NUMBERS]
    dist.all_gather(result, mine().view(2, 2).t())
    for each, x in enumerate(result):
        same(x, numbers(each).view(2, 2).t())


def check_all_gather_into_tensor() -> None:
    for dtype in DTYPES:
        result = torch.zeros(12, dtype=dtype, device="mps")
        dist.all_gather_into_tensor(result, mine(dtype))
        same(result, torch.cat([numbers(each, dtype) for each in range(3)]))
    rows = torch.zeros(3, 4, device="mps")  # its own part is the input, as FSDP has it
    rows[rank()] = mine()
    dist.all_gather_into_tensor(rows, rows[rank()])
    same(rows, NUMBERS)


def check_all_gather_into_tensor_coalesced() -> None:
    x, y = mine(), mine().bfloat16()
    outputs = functional.all_gather_into_tensor_coalesced([x, y], dist.group.WORLD)
    for result in map(functional.wait_tensor, outputs):
        same(result, torch.tensor(NUMBERS).reshape(-1))


def check_reduce_scatter() -> None:
    result = torch.zeros(4, device="mps")
    dist.reduce_scatter(result, [mine() + each for each in range(3)])
    same(result, torch.tensor(EXPECTED["SUM"]) + 3 * rank())


def check_reduce_scatter_tensor() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        for op, factor in ((Op.SUM, 1), (Op.MAX, 0)) + (((Op.AVG, 2),) if dtype.is_floating_point else ()):
            result = torch.zeros(2, dtype=dtype, device="mps")
            x = torch.tensor([0, 3, 6, 9, 12, 15]) + torch.tensor([0, 3, 6])[rank()]
            dist.reduce_scatter_tensor(result, x.to(dtype).to("mps"), op)
            first = torch.tensor([0, 3]) + 6 * rank()
            same(result, {0: first + 6, 1: 3 * first + 9, 2: first + 3}[factor])


def check_functional_reduce_scatter_coalesced() -> None:
    x = torch.arange(6.0, device="mps") + rank()
    (result,) = functional.reduce_scatter_tensor_coalesced([x], "sum", [0], dist.group.WORLD)
    same(functional.wait_tensor(result), 3 * torch.tensor([0.0, 1.0]) + 3 + 6 * rank())


def check_all_to_all() -> None:
    result = [torch.zeros(4, device="mps") for _ in NUMBERS]
    dist.all_to_all(result, [mine() + 10 * each for each in range(3)])
    for each, x in enumerate(result):
        same(x, numbers(each) + 10 * rank())


def check_all_to_all_single() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int16):
        x = torch.tensor([[rank(), each] for each in range(3)]).to(dtype).to("mps")
        result = torch.zeros(3, 2, dtype=dtype, device="mps")
        dist.all_to_all_single(result, x)
        same(result, [[each, rank()] for each in range(3)])


def check_all_to_all_single_with_sizes() -> None:
    """Process r sends j + 1 rows to process j, and none to the last."""
    sizes = [1, 2, 0]
    x = torch.tensor([[rank(), 0], [rank(), 1], [rank(), 2]], dtype=torch.bfloat16, device="mps")
    rows = sizes[rank()]
    result = torch.zeros(3 * rows, 2, dtype=torch.bfloat16, device="mps")
    dist.all_to_all_single(result, x, [rows] * 3, sizes)
    same(result, torch.tensor([[each, rank() + row] for each in range(3) for row in range(rows)]).reshape(-1, 2))


def check_wrong_sizes_are_not_taken_for_a_lost_connection() -> None:
    x = torch.zeros(3, 2, device="mps")
    try:
        dist.all_to_all_single(torch.zeros_like(x), x, [1, 1, 1], [1, 1, 3])
    except RuntimeError as error:
        assert "plit sizes" in str(error) and "connection" not in str(error), error
    else:
        raise AssertionError("wrong sizes were taken")


def check_gather_and_scatter() -> None:
    result = [torch.zeros(4, dtype=torch.int16, device="mps") for _ in NUMBERS] if rank() == 1 else None
    dist.gather(mine(torch.int16), result, dst=1)
    for each, x in enumerate(result or ()):
        same(x, NUMBERS[each])
    parts = [numbers(each).to("mps") for each in range(3)] if rank() == 2 else None
    part = torch.zeros(4, device="mps")
    dist.scatter(part, parts, src=2)
    same(part, NUMBERS[rank()])


def check_send_and_recv_in_each_dtype() -> None:
    for dtype in DTYPES:
        if rank() == 0:
            dist.send(mine(dtype), 1)
        elif rank() == 1:
            x = torch.zeros(4, dtype=dtype, device="mps")
            assert dist.recv(x, 0) == 0
            same(x, numbers(0, dtype))


def check_send_and_recv_by_tag() -> None:
    if rank() == 0:
        works = [dist.isend(mine() + tag, 2, tag=tag) for tag in (7, 8)]
    elif rank() == 2:
        x, y = apart(4), torch.zeros(4, device="mps")
        works = [dist.irecv(y, 0, tag=8), dist.irecv(x, 0, tag=7)]
    else:
        works = []
    for work in works:
        assert work is not None
        work.wait()
    if rank() == 2:
        same(x, numbers(0) + 7)
        same(y, numbers(0) + 8)


def check_recv_from_any_process() -> None:
    if rank() == 1:
        result = {}
        for _ in range(2):
            x = torch.zeros(4, device="mps")
            source = dist.recv(x)
            result[source] = x
        same(result[0], NUMBERS[0])
        same(result[2], NUMBERS[2])
    else:
        dist.send(mine(), 1)
    dist.barrier()  # or the second recv may take what process 0 sends in the next check


def check_a_ring_of_sends() -> None:
    x, result = mine(), torch.zeros(4, device="mps")
    to, source = (rank() + 1) % 3, (rank() + 2) % 3
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, result, source)]):
        work.wait()
    same(result, NUMBERS[source])


def check_barrier_waits_for_the_last() -> None:
    before = time.monotonic()
    if rank() == 2:
        time.sleep(0.3)
    dist.barrier()
    assert rank() == 2 or time.monotonic() - before >= 0.3 - 0.1


def check_objects() -> None:
    result: list[Any] = [None] * 3
    dist.all_gather_object(result, {"rank": rank(), "x": mine().cpu()})
    assert [each["rank"] for each in result] == [0, 1, 2] and result[2]["x"].tolist() == NUMBERS[2]
    given = [{"a": 1}, "b"] if rank() == 1 else [None, None]
    dist.broadcast_object_list(given, 1)
    assert given == [{"a": 1}, "b"]


def check_a_tensor_on_the_cpu_goes_to_gloo() -> None:
    x = mine().cpu()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None and "PythonCallbackWork" not in type(work).__name__
    work.wait()
    assert x.tolist() == EXPECTED["SUM"]


def check_groups_of_some() -> None:
    pair = dist.new_group([0, 2])
    if rank() != 1:
        x = mine()
        dist.all_reduce(x, group=pair)
        same(x, numbers(0) + numbers(2))
        y = mine()
        dist.broadcast(y, src=2, group=pair)
        same(y, NUMBERS[2])
    dist.barrier()


def check_async_work() -> None:
    x = mine()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None and work.wait(timedelta(seconds=20)) and work.is_completed()
    same(x, EXPECTED["SUM"])
    assert work.get_future().value()[0] is x


def check_a_future_completes_without_a_wait() -> None:
    x = mine()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    same(doubled, [2 * each for each in EXPECTED["SUM"]])
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    end = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    assert work.is_completed()
    same(x, [3 * each for each in EXPECTED["SUM"]])


def check_threads_of_gloo_do_not_touch_python() -> None:
    """DDP's reducer joins them while it holds Python's lock. One that waits for the lock would never end."""
    threads: set[str] = set()

    class Trace:
        def __del__(self) -> None:
            threads.add(threading.current_thread().name)

    sent = Copies.sent

    def traced(copies: Copies, value: Any) -> Any:
        result = sent(copies, value)
        if isinstance(result, torch.Tensor):
            result.when_released = Trace()  # type: ignore[attr-defined]
        return result

    with patch.object(Copies, "sent", traced):
        for _ in range(100):
            work = dist.all_gather_into_tensor(torch.empty(12, device="mps"), mine(), async_op=True)
            work = dist.all_gather([torch.empty(4, device="mps") for _ in range(3)], mine(), async_op=True)
            del work
        dist.barrier()
    assert threads <= {"MainThread", "torch_gdn collectives"}, threads


def check_many_at_once() -> None:
    tensors = [mine() * each for each in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for work in works[::-1]:
        assert work is not None
        work.wait()
    for each, x in enumerate(tensors):
        same(x, [each * total for total in EXPECTED["SUM"]])


def check_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        x, truths = mine(), mine(torch.int16)
        works = [dist.all_reduce(each, async_op=True) for each in (x, truths)]
    for work in works:
        assert work is not None
        work.get_future().wait()
    same(x, EXPECTED["SUM"])
    same(truths, EXPECTED["SUM"])


def check_agreement() -> None:
    torch_gdn.distributed.check_agreement("model", "same")
    try:
        torch_gdn.distributed.check_agreement("model", "other" if rank() == 1 else "one")
    except ValueError as error:
        assert str(error) == "model: expected the same in all processes, got one in rank 0 and other in rank 1", error
    else:
        raise AssertionError("different models were taken")


def check_a_wait_ends_in_time() -> None:
    pair = dist.new_group([0, 1])  # gloo closes the connections of a wait that ended too late
    if rank() == 0:
        x = torch.zeros(1, device="mps")
        work = dist.irecv(x, 1, group=pair)
        assert work is not None
        try:
            work.wait(timedelta(milliseconds=200))
        except RuntimeError as error:
            said = str(error)
            assert said.startswith("recv: rank 0 of 2: another process did not answer in time"), said
            assert "\n" not in said
        else:
            raise AssertionError("the wait ended without a message")


def check_compiled() -> None:
    @torch.compile(fullgraph=True)
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        world = dist.group.WORLD
        total = functional.all_reduce(x * 2, "sum", world)
        gathered = functional.all_gather_tensor(x, 0, world)
        return total + 1, gathered * 3, functional.reduce_scatter_tensor(gathered, "avg", 0, world)

    total, gathered, own = step(mine())
    same(total, 2 * torch.tensor(EXPECTED["SUM"]) + 1)
    same(gathered, 3 * torch.tensor(NUMBERS).reshape(-1))
    same(own, NUMBERS[rank()])


def check_copies_stay_until_the_gpu_has_read_them() -> None:
    x = mine()
    with patch.object(torch_gdn.distributed.Event, "query", lambda _: False):
        dist.all_reduce(x)
        assert [copy.tolist() for copy in Copies.being_read[-1][1]] == [EXPECTED["SUM"]]


def check_a_forked_process_starts_a_thread_of_its_own() -> None:
    with patch("os.getpid", lambda: -5):
        for _ in range(2):
            dist.all_reduce(mine())
    assert [thread.name for thread in threading.enumerate()].count("torch_gdn collectives") == 2


def check_tensors_of_a_mesh() -> None:
    mesh = dist.init_device_mesh("mps", (3,))
    whole = torch.arange(18, dtype=torch.float32).view(6, 3)
    rows = distribute_tensor(whole.to("mps"), mesh, [Shard(0)])
    same(rows.to_local(), whole[2 * rank() : 2 * rank() + 2])
    same(rows.full_tensor(), whole)
    columns = distribute_tensor(whole.to("mps"), mesh, [Shard(1)])
    same((columns @ rows[:3]).full_tensor(), whole @ whole[:3])


def check_copies_and_waits() -> None:
    """One copy each way; the host waits for the GPU only before it reads."""
    if on_a_mac():
        return
    import mps_simulator

    def counted(call: Callable[[], object], reads: int, writes: int, waits: int) -> None:
        torch.mps.synchronize()
        dist.barrier()
        with mps_simulator.profile() as profile:
            call()
        copies = {"to the host": reads, "to the device": writes}
        expected = {way: n for way, n in copies.items() if n}
        assert (profile.copies, profile.waits) == (expected, waits), str(profile)

    x, big, many = mine(), torch.ones(100_000, device="mps"), torch.zeros(12, device="mps")
    counted(lambda: dist.all_reduce(x), 1, 1, 1)
    counted(lambda: dist.all_reduce(big), 1, 1, 1)
    counted(lambda: dist.all_reduce_coalesced([x, many]), 2, 2, 1)
    counted(lambda: dist.all_gather_into_tensor(many, x), 1, 1, 1)
    counted(lambda: dist.reduce_scatter_tensor(x, many), 1, 1, 1)
    counted(lambda: dist.broadcast(x, 0), *((1, 0, 1) if rank() == 0 else (0, 1, 0)))
    counted(lambda: dist.reduce(x, 0), 1, int(rank() == 0), 1)
    counted(lambda: dist.barrier(), 0, 0, 0)
    if rank() < 2:
        call = (lambda: dist.send(big, 1)) if rank() == 0 else (lambda: dist.recv(big, 0))
        torch.mps.synchronize()
        with mps_simulator.profile() as profile:
            call()
        expected = ({"to the host": 1}, 1) if rank() == 0 else ({"to the device": 1}, 0)
        assert (profile.copies, profile.waits) == expected, str(profile)


CHECKS = [name for name in globals() if name.startswith("check_")]
OF_DEVICES = (  # what differs if the CPU's back end is gloo by its own name
    "check_all_reduce_with_each_op",
    "check_barrier_waits_for_the_last",
    "check_objects",
    "check_a_tensor_on_the_cpu_goes_to_gloo",
    "check_groups_of_some",
)


def checks_of(backend: str) -> tuple[str, ...] | list[str]:
    return CHECKS if backend == "torch_gdn" else OF_DEVICES


def main(own: str, size: str, address: str, backend: str) -> None:
    dist.init_process_group(
        backend,
        init_method=f"torch-gdn://{address}",
        rank=int(own),
        world_size=int(size),
        timeout=timedelta(seconds=60),
    )
    outcomes = {}
    for name in checks_of(backend):
        try:
            globals()[name]()
            outcomes[name] = "ok"
        except Exception:
            outcomes[name] = traceback.format_exc()
            break  # the other processes may be in another collective by now
    print("OUTCOMES" + json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
