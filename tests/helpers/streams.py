"""Servers in processes of their own, and requests that they stream while they are told to end."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

PATIENCE = 300  # seconds after which something is taken to hang


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[Any], port: int, path: str, log: Path) -> None:
    """Waits until a server that logs into the file answers."""
    for _ in range(2 * PATIENCE):
        assert server.poll() is None, f"the server ended\n{log.read_text()[-6000:]}"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5)
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"the server does not answer\n{log.read_text()[-6000:]}")


def begun(port: int, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    """Returns an answer whose first line has come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert answer.readline().strip()
    return answer


def wait_until_refused(port: int) -> None:
    """Waits until a server takes no new connections."""
    for _ in range(100 * PATIENCE):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        try:
            connection.connect()
        except ConnectionRefusedError:
            return
        connection.close()
        time.sleep(0.01)
    raise AssertionError("connections are not refused")


def events(answer: http.client.HTTPResponse) -> list[str]:
    """Returns the data of a stream's other events."""
    lines = answer.read().decode().splitlines()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


OTHERS = ("nanobind:", " - ", "See https://nanobind")  # what Triton prints at its exit


def assert_ended_by_sigterm(status: int, log: str) -> None:
    """`log` is what a server has printed, from its start on. SGLang goes on counting the tokens of running requests."""
    rest = "got SIGTERM: running requests have 30 s to end, and new ones are refused\n"
    before, told, after = log.partition(f"python -m torch_gdn serve: {rest}")
    assert told, before[-3000:]
    lines = [line for line in after.splitlines() if not line.startswith(OTHERS) and "Decode batch" not in line]
    assert lines == []
    assert status == 0
