"""Lets running requests end before an HTTP server obeys SIGTERM. New connections are refused meanwhile.

vLLM, SGLang and transformers all serve with uvicorn, and each treats SIGTERM differently: vLLM stops its engine while
requests stream, SGLang goes on taking new ones, and uvicorn exits with the signal's status. Here whatever they
registered for SIGTERM runs when the requests have ended, or after a time-out, which cancels those that are left.
"""

import asyncio
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

INHERITED = "TORCH_GDN_DRAINS"  # set in the environment of an engine's processes
GRACE = 2  # seconds in which cancelled requests close their connections


class Drain:
    """Ends the uvicorn servers of this process.

    Args:
        name: of the command, for its message.
        seconds: how long running requests may take.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.servers: list[tuple[Any, list[Any]]] = []  # with the sockets that they were given
        self.task: asyncio.Task[None] | None = None
        self.is_told = False  # to end

    def install(self) -> None:
        """Must run before a server starts. Until then SIGTERM ends the process with status 0."""
        import uvicorn

        server: Any = uvicorn.Server
        os.environ[INHERITED] = "1"
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn repeats the signal at its end
        server.startup = self.registering(server.startup)
        server.handle_exit = self.telling(server.handle_exit)
        for loop in classes_of_loops():
            loop.add_signal_handler = self.delaying(loop.add_signal_handler)

    def registering(self, startup: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(startup)
        async def start(server: Any, sockets: Any = None) -> None:
            server.config.timeout_graceful_shutdown = self.seconds
            self.servers.append((server, list(sockets or [])))
            await startup(server, sockets)

        return start

    def telling(self, handle_exit: Callable[..., None]) -> Callable[..., None]:
        """uvicorn's own handler, which transformers uses, drains by itself."""

        @functools.wraps(handle_exit)
        def handle(server: Any, sig: int, frame: Any) -> None:
            if sig == signal.SIGTERM and not server.should_exit:
                self.tell()
            handle_exit(server, sig, frame)

        return handle

    def delaying(self, add: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(add)
        def add_signal_handler(loop: Any, sig: int, callback: Callable[..., None], *arguments: Any) -> None:
            if sig == signal.SIGTERM:
                add(loop, sig, self.begin, loop, functools.partial(callback, *arguments))
            else:
                add(loop, sig, callback, *arguments)

        return add_signal_handler

    def begin(self, loop: Any, then: Callable[[], None]) -> None:
        """Handles SIGTERM. A second one cancels the requests that still run."""
        if self.task is None:
            self.tell()
            self.task = loop.create_task(self.drain())
            self.task.add_done_callback(lambda _: then())
        else:
            self.task.cancel()

    def tell(self) -> None:
        self.is_told = True
        rest = f"running requests have {self.seconds:g} s to end, and new ones are refused"
        print(f"{self.name}: got SIGTERM: {rest}", file=sys.stderr, flush=True)
        logging.disable(logging.WARNING)

    def leave(self) -> None:
        """Ends the process if it was told to, whatever threads it has. Otherwise does nothing."""
        if self.is_told:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    async def drain(self) -> None:
        for server, sockets in self.servers:
            for listener in getattr(server, "servers", []):
                listener.close()
            for each in sockets:
                each.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
        try:
            await asyncio.wait_for(self.ended(), self.seconds)
        except (asyncio.TimeoutError, asyncio.CancelledError):
            logging.disable(logging.ERROR)  # uvicorn prints how each cancelled request failed
            for task in self.tasks():
                task.cancel()
            await asyncio.wait([asyncio.ensure_future(self.ended())], timeout=GRACE)

    def tasks(self) -> Iterator[Any]:
        return (task for server, _ in self.servers for task in list(server.server_state.tasks))

    async def ended(self) -> None:
        while any(server.server_state.connections or server.server_state.tasks for server, _ in self.servers):
            await asyncio.sleep(0.05)


def classes_of_loops() -> Iterator[Any]:
    yield asyncio.SelectorEventLoop
    if find_spec("uvloop") is not None:
        yield import_module("uvloop").Loop


def is_inherited() -> bool:
    """Returns whether a command that drains started this process."""
    return INHERITED in os.environ


def silence_shutdown(logger: logging.Logger) -> None:
    """Drops vLLM's notes about its own shutdown: the command says that it ends."""
    for handler in logger.handlers:
        handler.addFilter(lambda record: not str(record.msg).startswith(("[shutdown]", "Parent process exited")))
