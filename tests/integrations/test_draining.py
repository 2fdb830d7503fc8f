"""Tests how a server ends after SIGTERM, with a small application in place of an engine."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.streams import PATIENCE, begun, wait_until_refused
from torch_gdn.integrations import draining

SERVER = """
import asyncio, logging, os, runpy, signal, sys
import uvicorn

file, kind, seconds, go = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
Drain = runpy.run_path(file)["Drain"]  # without torch, which takes a while to import
aborted = asyncio.Event()

def stop():
    logging.getLogger("uvicorn.error").warning("the engine stops")
    aborted.set()
    server.should_exit = True

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    if kind == "engine that handles the signal after its first request":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"first\\n", "more_body": True})
    while not os.path.exists(go) and not aborted.is_set():
        await asyncio.sleep(0.01)
    await send({"type": "http.response.body", "body": b"aborted" if aborted.is_set() else b"last"})

class Noting(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)

async def serve():
    if kind == "engine that handles the signal":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        await server._serve()
    else:
        await server.serve()

Drain("serve", seconds).install()
server = Noting(uvicorn.Config(app, port=0, lifespan="off"))
asyncio.run(serve())
"""
KINDS = ["uvicorn", "engine that handles the signal", "engine that handles the signal after its first request"]


class Server:
    def __init__(self, kind: str, seconds: int, go: Path) -> None:
        command = [sys.executable, "-c", SERVER, draining.__file__, kind, str(seconds), str(go)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def asked(self) -> http.client.HTTPResponse:
        return begun(self.port, "/", {})

    def ended(self) -> list[str]:
        """Returns the lines after the server's start."""
        _, log = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, log
        return [line for line in log.splitlines() if not line.startswith("INFO: ")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_running_request_ends_and_new_ones_are_refused(kind: str, tmp_path: Path) -> None:
    server = Server(kind, 600, tmp_path / "go")
    idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    idle.connect()
    answer = server.asked()
    server.process.send_signal(signal.SIGTERM)
    wait_until_refused(server.port)
    (tmp_path / "go").touch()
    assert answer.read() == b"last"
    wanted = "serve: got SIGTERM: running requests have 600 s to end, and new ones are refused"
    assert server.ended() == [wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_takes_too_long_is_cut(kind: str, tmp_path: Path) -> None:
    server = Server(kind, 0, tmp_path / "go")
    answer = server.asked()
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        answer.read()
    assert server.ended()[0].startswith("serve: got SIGTERM: running requests have 0 s to end")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_second_signal_cuts_the_requests(kind: str, tmp_path: Path) -> None:
    server = Server(kind, 600, tmp_path / "go")
    answer = server.asked()
    server.process.send_signal(signal.SIGTERM)
    wait_until_refused(server.port)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        answer.read()
    assert len(server.ended()) == 1
