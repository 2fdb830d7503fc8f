"""Two network namespaces of Linux with a cable between them that is slow or can be pulled. It takes root's rights."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "cable"
TUNSETIFF, TUN_WITHOUT_HEADERS = 0x400454CA, 0x1001
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
CAN_BE_LAID = shutil.which("ip") is not None and os.access("/dev/net/tun", os.W_OK) and os.geteuid() == 0


def call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), name)


class Cable:
    """Carries each packet `delay` seconds later. None is carried once it is pulled."""

    def __init__(self, delay: float) -> None:
        self.delay, self.is_pulled, self.packets = delay, False, 0
        self.home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.networks, self.ends = zip(*map(self.made, ADDRESSES), strict=True)
        self.stop, self.stopped = os.pipe()
        self.thread = threading.Thread(target=self.carry, daemon=True)
        self.thread.start()

    def made(self, address: str) -> tuple[int, int]:
        """Returns a new network and the end of the cable in it."""
        call("unshare", NEW_NETWORK)
        try:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), TUN_WITHOUT_HEADERS))
            for command in (f"addr add {address}/24 dev {INTERFACE}", f"link set {INTERFACE} up", "link set lo up"):
                subprocess.run(["ip", *command.split()], check=True)
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY), end
        finally:
            call("setns", self.home, NEW_NETWORK)

    @contextmanager
    def at(self, end: int) -> Iterator[None]:
        """What this thread starts and connects to is in this end's network."""
        call("setns", self.networks[end], NEW_NETWORK)
        try:
            yield
        finally:
            call("setns", self.home, NEW_NETWORK)

    def carry(self) -> None:
        waiting: deque[tuple[float, int, bytes]] = deque()
        while True:
            left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select([*self.ends, self.stop], [], [], left)
            if self.stop in ready:
                return
            for i in (0, 1):
                if self.ends[i] in ready:
                    waiting.append((time.monotonic() + self.delay, self.ends[1 - i], os.read(self.ends[i], 1 << 16)))
            while waiting and waiting[0][0] <= time.monotonic():
                _, end, packet = waiting.popleft()
                if not self.is_pulled:
                    os.write(end, packet)
                    self.packets += 1

    def close(self) -> None:
        os.write(self.stopped, b"0")
        self.thread.join()
        for each in (*self.ends, *self.networks, self.home, self.stop, self.stopped):
            os.close(each)


@contextmanager
def laid(delay: float) -> Iterator[Cable]:
    cable = Cable(delay)
    try:
        yield cable
    finally:
        cable.close()
