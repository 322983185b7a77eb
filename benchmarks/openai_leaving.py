"""Opens 64 streams again and again, leaves them, and measures what remains.

    python -m benchmarks.openai_leaving [--minutes N] [--keep]

Each client reads the first word of an endless text and closes its connection. The model then says
how many texts are in progress, until there is none. `--keep` writes the row into
docs/explanation/performance.md.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import time
from contextlib import ExitStack, closing
from pathlib import Path

import psutil

from benchmarks.page import Report
from benchmarks.servers import RunningServer, ours

REPOSITORY = Path(__file__).resolve().with_name("repository")
HEADINGS = ("64 clients that leave", "streams left", "ms to the last text: p50", "longest", "MB")
CLIENTS = 64
DEADLINE = 60.0  # seconds for any answer

_MODEL = "endless_text"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--keep", action="store_true", help="write the row into the page")
    arguments = parser.parse_args()
    report = Report(arguments.keep)
    with ours(REPOSITORY) as server:
        _leave(server)  # the first streams import and allocate what stays
        started, first = time.monotonic(), _megabytes(server)
        times: list[float] = []
        while time.monotonic() - started < arguments.minutes * 60:
            times.append(_leave(server))
        last = _megabytes(server)
    row = [f"for {arguments.minutes:g} minutes", f"{len(times) * CLIENTS:,}"]
    row += [f"{statistics.median(times) * 1e3:.0f}", f"{max(times) * 1e3:.0f}"]
    report.row(HEADINGS, [*row, f"{first:.0f} before, {last:.0f} after"])


def _leave(server: RunningServer) -> float:
    """Opens and leaves all streams; returns the seconds until the model has no text in progress."""
    body = json.dumps({"model": _MODEL, "prompt": "go", "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with ExitStack() as clients:
        address = ("127.0.0.1", server.http_port)
        streams = [
            clients.enter_context(socket.create_connection(address, DEADLINE))
            for _ in range(CLIENTS)
        ]
        for stream in streams:
            stream.sendall(head + body)
        for stream in streams:
            answer = b""
            while b" word" not in answer:
                part = stream.recv(65536)
                if not part:
                    raise SystemExit(f"a stream ended early: {answer!r}")
                answer += part
    left = time.monotonic()
    while _in_progress(server):
        if time.monotonic() - left > DEADLINE:
            raise SystemExit(f"texts are still in progress {DEADLINE} s after their clients left")
    return time.monotonic() - left


def _in_progress(server: RunningServer) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=DEADLINE)
    with closing(connection):
        body = json.dumps({"text_input": "count"})
        connection.request("POST", f"/v2/models/{_MODEL}/generate", body)
        return int(json.load(connection.getresponse())["text_output"])


def _megabytes(server: RunningServer) -> float:
    """Returns the proportional set size of the host and its stubs, in MB."""
    host = psutil.Process(server.pid)
    return sum(p.memory_full_info().pss for p in [host, *host.children(recursive=True)]) / 1e6


if __name__ == "__main__":
    main()
