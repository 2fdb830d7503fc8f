"""Collectives of torch.distributed for tensors on `mps`, over gloo.

PyTorch registers no kernels of its collective ops for `mps`. Importing this module registers them: each copies what the
collective reads to the CPU, calls the same op there, and copies what it wrote back. It registers the back end
`torch_gdn`, which is gloo, bound to one address.

>>> import torch.distributed as dist
>>> import torch_gdn.distributed
>>> dist.is_backend_available("torch_gdn")
True

It also gives torch.mps the names that DeviceMesh wants of a device's module, as far as PyTorch lacks them.

`init_process_group("torch_gdn")` serves the CPU and `mps`; `"cpu:gloo,mps:torch_gdn"` does too. Nothing here is
authenticated or encrypted: use a network that only your machines are on.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import platform
import re
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, PrefixStore, PythonCallbackWork, Store, TCPStore
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.mps.event import Event

from torch_gdn import _C
from torch_gdn._version import __version__

NAME = "torch_gdn"
SCHEME = "torch-gdn"  # of an address, which may hold no underscore
INTERFACE = "GLOO_SOCKET_IFNAME"  # gloo's variable: the interface whose address it uses


# ---- which collective reads and writes what --------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """A collective op of c10d. Tensors of a process that does not read are not copied to the CPU, and those of one that
    does not write are not copied back.
    """

    name: str  # that of the public function
    reads: int | None  # the position of the argument with the tensors that it reads
    writes: int | None  # and of that with those that it writes
    readers: str = "all"  # processes, the "root", or the "others"
    writers: str = "all"


COLLECTIVES = {
    "allreduce_": Collective("all_reduce", 0, 0),
    "allreduce_coalesced_": Collective("all_reduce_coalesced", 0, 0),
    "broadcast_": Collective("broadcast", 0, 0, readers="root", writers="others"),
    "reduce_": Collective("reduce", 0, 0, writers="root"),
    "allgather_": Collective("all_gather", 1, 0),
    "_allgather_base_": Collective("all_gather_into_tensor", 1, 0),
    "allgather_coalesced_": Collective("all_gather_coalesced", 1, 0),
    "allgather_into_tensor_coalesced_": Collective("all_gather_into_tensor", 1, 0),
    "reduce_scatter_": Collective("reduce_scatter", 1, 0),
    "_reduce_scatter_base_": Collective("reduce_scatter_tensor", 1, 0),
    "reduce_scatter_tensor_coalesced_": Collective("reduce_scatter_tensor", 1, 0),
    "alltoall_": Collective("all_to_all", 1, 0),
    "alltoall_base_": Collective("all_to_all_single", 1, 0),
    "gather_": Collective("gather", 1, 0, writers="root"),
    "scatter_": Collective("scatter", 1, 0, readers="root"),
    "send": Collective("send", 0, None),
    "recv_": Collective("recv", None, 0),
    "recv_any_source_": Collective("recv", None, 0),
    "barrier": Collective("barrier", None, None),
}


# ---- copies ----------------------------------------------------------------------------------------------------------


@dataclass
class Staged:
    """A tensor on `mps` and its copy on the CPU."""

    on_device: Tensor
    on_cpu: Tensor  # contiguous and of the tensor's dtype
    sent: Tensor  # what gloo gets: the bytes of `on_cpu`, or its numbers in a dtype that gloo adds


CARRIERS = {  # the dtypes of mps that gloo does not add, and those in which it adds their numbers
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


class Reduction:
    """A reduction as gloo can do it: its op, and the dtype in which it reduces. gloo has no AVG."""

    def __init__(self, name: str, op: Any, size: int):
        self.name, self.asked, self.size, self.op = name, ReduceOp.RedOpType(op.op()), size, op
        if self.asked == ReduceOp.AVG:
            self.op = torch.classes.c10d.ReduceOp()  # SUM

    def to_gloo(self, here: Tensor) -> Tensor:
        asked = self.asked
        adds = asked in (ReduceOp.SUM, ReduceOp.AVG)
        if here.is_complex() and adds:
            return torch.view_as_real(here)
        if here.is_complex() or (here.dtype == torch.uint64 and asked in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)):
            raise TypeError(f"{self.name}: op: expected SUM for tensors of {here.dtype}, got {asked.name}")
        if here.dtype == torch.bool and asked == ReduceOp.AVG:
            raise TypeError(f"{self.name}: op: expected another op than AVG for tensors of {here.dtype}")
        return here.to(CARRIERS.get(here.dtype, here.dtype))

    def from_gloo(self, staged: Staged) -> None:
        if self.asked == ReduceOp.AVG:
            staged.sent.div_(self.size, rounding_mode=None if staged.sent.is_floating_point() else "trunc")
        if staged.sent.dtype != staged.on_cpu.dtype and not staged.on_cpu.is_complex():
            staged.on_cpu.copy_(staged.sent)


def as_bytes(x: Tensor, keep_rows: bool) -> Tensor:
    """Returns the bytes of a contiguous x, since gloo moves only some dtypes. [rows, bytes per row] or [bytes]."""
    flat = x.reshape(-1).view(torch.uint8)
    return flat.view(x.shape[0], flat.numel() // x.shape[0]) if keep_rows and x.dim() and x.shape[0] else flat


class Copies:
    """The tensors of one call. Blocks of the CPU stay allocated until the GPU has read them."""

    being_read: ClassVar[deque[tuple[Event, list[Tensor]]]] = deque()
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, to_sent: Callable[[Tensor], Tensor]):
        self.to_sent = to_sent
        self.read: list[Staged] = []
        self.written: list[Staged] = []

    def stage(self, value: Any, read: bool, written: bool) -> Any:
        """Returns the argument with copies instead of its tensors on `mps`; `finish_reading` waits for them."""
        if isinstance(value, list | tuple):
            return [self.stage(each, read, written) for each in value]
        if value.device.type != "mps":
            return value
        here = torch.empty(value.shape, dtype=value.dtype)
        staged = Staged(value, here, here)
        if read:
            here.copy_(value.detach(), non_blocking=True)
            self.read.append(staged)
        if written:
            self.written.append(staged)
        return staged

    def finish_reading(self) -> None:
        if self.read:
            torch.mps.synchronize()

    def sent(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.sent(each) for each in value]
        if isinstance(value, Staged):
            value.sent = self.to_sent(value.on_cpu)
            return value.sent
        return value

    def write_back(self) -> None:
        """Copies the results to `mps`, in the stream's order. The host does not wait."""
        if not self.written:
            return
        for staged in self.written:
            staged.on_device.copy_(staged.on_cpu, non_blocking=True)
        event = Event()
        event.record()
        with self.lock:
            self.being_read.append((event, [staged.on_cpu for staged in self.written]))
            while self.being_read and self.being_read[0][0].query():
                self.being_read.popleft()


# ---- a call ----------------------------------------------------------------------------------------------------------


class Call:
    """A collective under way: gloo's work, and what follows it.

    It holds no reference to the group, which gloo's thread must not be the last to release.
    """

    def __init__(self, who: str, copies: Copies, reduction: Reduction | None):
        self.who, self.copies, self.reduction = who, copies, reduction
        self.lock, self.is_done = threading.RLock(), False
        self.work: Work | None = None
        self.future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta) -> bool:
        """Waits for gloo, and copies the results back unless another thread has."""
        assert self.work is not None
        if not self.is_done:
            try:
                with explained(self.who):
                    self.work.wait(timeout) if timeout else self.work.wait()
            except Exception as error:
                if self.future:
                    torch.ops.gdn_c10d.set_error(self.future, str(error))
                raise
        with self.lock:
            if not self.is_done:
                self.is_done = True
                self.finish()
        return True

    def finish(self) -> None:
        with torch.inference_mode():  # outside it, a tensor that was made in it may not be written
            for staged in self.copies.written if self.reduction else ():
                self.reduction.from_gloo(staged)  # type: ignore[union-attr]
            self.copies.write_back()
        if self.future and not self.future.done():
            self.future.set_result([staged.on_device for staged in self.copies.written])

    def to_work(self, work: Any) -> Work:
        """Returns the work for the caller, of gloo's. It completes by itself if that does, or when it is waited for."""
        self.work = Work.unbox(work)
        result = PythonCallbackWork(self.wait)
        self.future = result.get_future()

        def complete() -> None:
            with contextlib.suppress(Exception):
                result.wait()  # so that the future has an error, and is_completed() is true

        FINISHER.when_done(work, complete)
        return result


class Finisher:
    """Finishes calls that gloo has done, in a thread of its own, which starts with the first call.

    gloo's threads cannot: they would need the interpreter's lock, and DDP's reducer may hold it while it releases the
    group and waits for them to end. They write the number of the call to a pipe.
    """

    def __init__(self) -> None:
        self.calls: dict[int, Callable[[], None]] = {}
        self.numbers, self.lock, self.process = itertools.count(), threading.Lock(), -1

    def when_done(self, work: Any, finish: Callable[[], None]) -> None:
        with self.lock:
            if self.process != os.getpid():  # a child that was forked has no thread
                self.start()
            number = next(self.numbers)
        self.calls[number] = finish
        if not torch.ops.gdn_c10d.notify(work, self.end_to_write, number):
            del self.calls[number]

    def start(self) -> None:
        self.process, (self.end_to_read, self.end_to_write) = os.getpid(), os.pipe()
        thread = threading.Thread(target=self.run, args=(self.end_to_read,), name="torch_gdn collectives", daemon=True)
        thread.start()
        atexit.register(self.stop, self.process, thread, self.end_to_write)

    def run(self, end_to_read: int) -> None:
        while (number := int.from_bytes(os.read(end_to_read, 8), sys.byteorder, signed=True)) >= 0:
            self.calls.pop(number)()

    def stop(self, process: int, thread: threading.Thread, end_to_write: int) -> None:
        if process == os.getpid():
            os.write(end_to_write, (-1).to_bytes(8, sys.byteorder, signed=True))
            thread.join(timeout=10)


FINISHER = Finisher()


class FromAnySource(Work):
    """The work of a recv without a source. It lives until it has been waited for: C++ holds no reference to Python's
    part of it.
    """

    alive: ClassVar[set[FromAnySource]] = set()

    def __init__(self, call: Call, work: Work):
        super().__init__()
        self.call, self.source = call, work
        call.work = work
        self.alive.add(self)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.alive.discard(self)
        return self.call.wait(timeout)

    def _source_rank(self) -> int:
        return self.source._source_rank()


@contextlib.contextmanager
def explained(who: str) -> Iterator[None]:
    """Says in one line what gloo's errors of the connection mean. Other errors pass."""
    try:
        yield
    except RuntimeError as error:
        said = re.sub(r"^\[\S+:\d+\] ", "", str(error).partition("\n")[0]).partition(". This is")[0]
        if re.search("timed out|timeout", said, re.I):
            what = "another process did not answer in time"
        elif re.search("connection|closed|reset by peer|broken pipe", said, re.I):
            what = "the connection to another process is lost"
        else:
            raise
        raise RuntimeError(f"{who}: {what} (gloo: {said})") from error


def kernel_of(name: str) -> Callable[..., Any]:
    """Returns the kernel of the op c10d::`name` for `mps`."""
    _C.define_collective(name)
    op, collective = getattr(torch.ops.c10d, name).default, COLLECTIVES[name]
    on_gloo = getattr(torch.ops.gdn_c10d, name).default
    positions = {argument.name: i for i, argument in enumerate(op._schema.arguments)}
    tensors = {position for position in (collective.reads, collective.writes) if position is not None}
    moves_rows = name == "alltoall_base_"
    returns_tensors = len(op._schema.returns) == 2

    def kernel(*given: Any) -> Any:
        arguments = list(given)
        group = ProcessGroup.unbox(arguments[positions["process_group"]])
        root = arguments[positions["root_rank"]] if "root_rank" in positions else -1
        roles = ("all", "root" if group.rank() == root else "others")
        reduction = None
        if "reduce_op" in positions:
            reduction = Reduction(collective.name, arguments[positions["reduce_op"]], group.size())
        copies = Copies(reduction.to_gloo if reduction else lambda x: as_bytes(x, moves_rows))
        if not tensors:  # a barrier
            arguments[0] = torch.empty(arguments[0].shape)
        for position in tensors:
            reads = position == collective.reads and collective.readers in roles
            writes = position == collective.writes and collective.writers in roles
            arguments[position] = copies.stage(arguments[position], reads, writes)
        copies.finish_reading()
        for position in tensors:
            arguments[position] = copies.sent(arguments[position])
        if reduction:
            arguments[positions["reduce_op"]] = reduction.op
        who = f"{collective.name}: rank {group.rank()} of {group.size()}"
        call = Call(who, copies, reduction)
        with explained(who):
            work = on_gloo(*arguments)
        if name == "recv_any_source_":
            return Work.boxed(FromAnySource(call, Work.unbox(work)))
        boxed = Work.boxed(call.to_work(work))
        return (given[0], boxed) if returns_tensors else boxed

    return kernel


# ---- the back end ----------------------------------------------------------------------------------------------------


def host_of(store: Store) -> str:
    """Returns the address of a TCPStore, or the loopback address for other stores, which one machine uses."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else "127.0.0.1"


def address_towards(host: str) -> str:
    """Returns this machine's address on the network on which it reaches host. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def check_versions(store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Raises unless every process of the group comes within the time-out and has the same versions."""
    own = f"torch_gdn {__version__} with PyTorch {torch.__version__.partition('+')[0]}"
    store.set(f"{NAME}/versions/{rank}", f"{own}\n{platform.node()}")
    keys = [f"{NAME}/versions/{each}" for each in range(size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        absent = [str(each) for each, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"init_process_group: expected {size} processes, got none of rank {', '.join(absent)} "
            f"within {timeout.total_seconds():g} s"
        ) from error
    for each, (theirs, _, host) in enumerate(store.get(key).decode().partition("\n") for key in keys):
        if theirs != own:
            wait_for_readers(store, rank, size)
            raise RuntimeError(
                f"init_process_group: expected the same versions in all processes, got {own} in rank {rank} "
                f"and {theirs} in rank {each} on {host}"
            )


def wait_for_readers(store: Store, rank: int, size: int) -> None:
    """Lets every process read what the store has before rank 0 ends, and the store with it."""
    store.set(f"{NAME}/read/{rank}", "")
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            store.wait([f"{NAME}/read/{each}" for each in range(size)], timedelta(seconds=10))


def check_agreement(what: str, own: str) -> None:
    """Raises in every process unless `own` is the same text in all of the default group. `what` is its name."""
    result: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(result, own)
    for rank, theirs in enumerate(result):
        if theirs != result[0]:
            raise ValueError(
                f"{what}: expected the same in all processes, got {result[0]} in rank 0 and {theirs} in rank {rank}"
            )


class Ring:
    """Tells a program when another process of the default group ends or is stopped, in a collective or not.

    Each process sends a byte each second to the one after it, and another when it ends in order. If it dies or its
    machine is out of reach, the connection breaks. A program that is told ends too, and so the next process is told.

    Args:
        tell: gets one line that says what happened, in a thread of its own, unless this process has called `leave`.
        seconds: after which a silence of the process before, whose machine still answers, is told.
    """

    ALIVE, ENDED = b"1", b"0"
    PROBES: ClassVar[dict[str, int]] = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}

    def __init__(self, tell: Callable[[str], None], seconds: float):
        rank, size = dist.get_rank(), dist.get_world_size()
        self.tell, self.seconds, self.has_left = tell, seconds, threading.Event()
        self.last = f"rank {(rank - 1) % size} of the processes"
        address = address_towards(host_of(dist.distributed_c10d._get_default_store()))
        addresses: list[Any] = [None] * size
        with socket.create_server((address, 0), family=socket.getaddrinfo(address, 0)[0][0]) as listener:
            listener.settimeout(seconds)
            dist.all_gather_object(addresses, listener.getsockname()[:2])
            self.after = socket.create_connection(addresses[(rank + 1) % size], timeout=seconds)
            self.before, _ = listener.accept()
        self.before.settimeout(seconds)
        self.before.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in self.PROBES.items():
            if hasattr(socket, name):  # macOS and Linux name the first one differently
                self.before.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        for run in (self.send, self.wait):
            threading.Thread(target=run, name="torch_gdn ring", daemon=True).start()

    def send(self) -> None:
        with contextlib.suppress(OSError):
            while not self.has_left.wait(timeout=1):
                self.after.sendall(self.ALIVE)

    def wait(self) -> None:
        try:
            while (got := self.before.recv(1)) == self.ALIVE:
                pass
            said = f"{self.last} has ended" if got else f"{self.last}: the connection is lost"
        except OSError as error:
            said = f"{self.last}: the connection is lost ({error})"
            if error.errno is None:  # recv's own time-out; that of the probes has a number
                said = f"{self.last} has not answered for {self.seconds:g} s"
        if not self.has_left.is_set():
            self.tell(said)

    def leave(self) -> None:
        """Says that this process ends in order."""
        self.has_left.set()
        with contextlib.suppress(OSError):  # the other may have ended
            self.after.sendall(self.ENDED)
        with contextlib.suppress(OSError):
            self.before.shutdown(socket.SHUT_RD)  # ends the thread


def create(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """Returns gloo on the interface that GLOO_SOCKET_IFNAME names, or else on the one that reaches the store."""
    check_versions(store, rank, size, timeout)
    gloo: Any = dist.ProcessGroupGloo
    interface = os.environ.get(INTERFACE)
    where = {"interface": interface} if interface else {"hostname": address_towards(host_of(store))}
    options = gloo._Options()
    options._timeout, options._devices = timeout, [gloo.create_device(**where)]
    backend: Backend = gloo(store, rank, size, options)
    return backend


def rendezvous(url: str, timeout: timedelta = timedelta(minutes=5), **_: object) -> Iterator[tuple[Any, int, int]]:
    """Serves `init_method="torch-gdn://ADDRESS:PORT"`: as tcp://, but rank 0 listens on ADDRESS alone."""
    parts = urlparse(url)
    if not parts.hostname or not parts.port:
        raise ValueError(f"init_method: expected torch-gdn://ADDRESS:PORT, got {url!r}")
    query = parse_qs(parts.query)
    rank, size = (int(query.get(name, ["-1"])[0]) for name in ("rank", "world_size"))
    if rank < 0 or size < 1:
        raise ValueError("init_process_group: expected rank and world_size with an init_method, got none")
    listener = None
    if rank == 0:
        family = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((parts.hostname, parts.port), family=family).detach()
    try:  # it does not wait for the others: `check_versions` does, and names those that do not come
        store = TCPStore(parts.hostname, parts.port, size, rank == 0, timeout, False, master_listen_fd=listener)
    except dist.DistNetworkError as error:
        raise RuntimeError(
            f"init_process_group: expected rank 0 on {parts.hostname}:{parts.port}, got no answer within "
            f"{timeout.total_seconds():g} s"
        ) from error
    yield store, rank, size
    raise RuntimeError("init_process_group: torch-gdn:// does not take new processes later")


# ---- registration ----------------------------------------------------------------------------------------------------


def complete_torch_mps(**names: Any) -> None:
    """Adds these names to torch.mps, unless PyTorch has them."""
    for name, value in names.items():
        if not hasattr(torch.mps, name):
            setattr(torch.mps, name, value)


def refuse(*_: object) -> Backend:
    raise RuntimeError(
        f"init_process_group: PyTorch {torch.__version__} has collectives for mps itself: use its own back end, "
        f"{dist.Backend.default_device_backend_map.get('mps')!r}, instead of {NAME!r}"
    )


def register() -> torch.library.Library | None:
    """Registers the kernels and the back end, unless PyTorch has its own."""
    register_rendezvous_handler(SCHEME, rendezvous)
    if torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "MPS"):
        dist.Backend.register_backend(NAME, refuse, devices=["cpu", "mps"])
        return None
    dist.Backend.register_backend(NAME, create, devices=["cpu", "mps"])
    complete_torch_mps(is_initialized=lambda: True, current_device=lambda: 0)  # DeviceMesh uses them; mps is one device
    _C.define_work()
    kernels = torch.library.Library("c10d", "IMPL", "MPS")
    for name in COLLECTIVES:
        kernels.impl(name, kernel_of(name))
    return kernels


_KERNELS = register() if dist.is_available() else None
