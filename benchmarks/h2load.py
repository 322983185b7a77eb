"""Runs h2load (of nghttp2): one request at a time per connection, over HTTP/2 or HTTP/1.1."""

from __future__ import annotations

import re
import statistics
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SERVICE = "inference.GRPCInferenceService"
GRPC = {"content-type": "application/grpc", "te": "trailers"}
JSON = {"content-type": "application/json"}
WARM_UP = 1.0  # seconds of warm-up before the measurement


@dataclass(frozen=True)
class LoadResult:
    """Requests per second, and the latency in microseconds."""

    rate: float
    p50: float
    p99: float


def grpc_frame(message: bytes) -> bytes:
    """Frames a message for gRPC, without compression."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def h2load(
    url: str, body: bytes, headers: Mapping[str, str], connections: int, seconds: float
) -> LoadResult:
    """Sends the same body for `seconds`; over HTTP/2 if it is a gRPC message.

    Raises SystemExit if h2load fails, or if any status is not 2xx.
    """
    with tempfile.TemporaryDirectory() as folder:
        data, log = Path(folder, "body"), Path(folder, "log")
        data.write_bytes(body)
        options = [option for key, value in headers.items() for option in ("-H", f"{key}: {value}")]
        options += [] if headers == GRPC else ["--h1"]
        done = subprocess.run(
            [
                *("h2load", "-c", str(connections), "-m", "1", *options),
                *("-D", f"{seconds * 1e3:.0f}ms", "--warm-up-time", f"{WARM_UP * 1e3:.0f}ms"),
                *("-d", str(data), "--log-file", str(log), url),
            ],
            capture_output=True,
            text=True,
        )
        lines = log.read_text().splitlines() if log.exists() else []
    clean = re.search(r" (\d+) succeeded, 0 failed, 0 errored, 0 timeout", done.stdout)
    if done.returncode or not clean or not int(clean[1]):
        raise SystemExit(f"h2load failed at {url}:\n{done.stdout}\n{done.stderr}")
    return summarize([int(line.split("\t")[2]) for line in lines], seconds)


def summarize(micros: list[int], seconds: float) -> LoadResult:
    """Summarises latencies; there must be at least two of them."""
    percentiles = statistics.quantiles(micros, n=100, method="inclusive")
    return LoadResult(len(micros) / seconds, percentiles[49], percentiles[98])
