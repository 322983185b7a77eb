"""The witness of a fault: a process that sends a small request every 5 ms and notes its time."""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType

import grpc
from tritonclient.grpc import service_pb2 as pb

from tests.conftest import DEADLINE, RunningHost

MODEL = "witness"
PERIOD = 0.005
"""Seconds between two requests."""
INFERS_PER_LIVE = 10
"""Requests between two `live` requests over HTTP."""
LAST_INFERS = 40
"""Requests after the fault: the host may still have to deal with what it was sent."""


@dataclass
class Testimony:
    """What a witness saw. Times are in seconds, from sending a request to its response."""

    waits: list[float]
    live_waits: list[float]
    errors: list[str]

    @property
    def p99(self) -> float:
        """The time that 99 % of the requests did not exceed."""
        ordered = sorted(self.waits)
        return ordered[int(len(ordered) * 0.99)] if ordered else 0.0

    @property
    def longest(self) -> float:
        """The longest time of a request, over gRPC or HTTP."""
        return max([*self.waits, *self.live_waits], default=0.0)


class Witness:
    """Runs from `__enter__` to `testify`. The model `witness` must be served."""

    def __init__(self, host: RunningHost) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.witness", host.url, host.http_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Witness:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the witness could not begin"
        return self

    def testify(self) -> Testimony:
        """Ends the requests and returns their times."""
        output, _ = self._process.communicate("\n", timeout=DEADLINE)
        return Testimony(**json.loads(output))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def _request() -> bytes:
    request = pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1])
    request.raw_input_contents.append(b"\0\0\x80?")
    data: bytes = request.SerializeToString()
    return data


def _main(grpc_url: str, http_url: str) -> None:
    waits: list[float] = []
    live_waits: list[float] = []
    errors: list[str] = []
    request = _request()
    with (
        grpc.insecure_channel(grpc_url) as channel,
        closing(http.client.HTTPConnection(http_url, timeout=DEADLINE)) as connection,
    ):
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", bytes, bytes)
        infer(request, timeout=DEADLINE, wait_for_ready=True)
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
        print("ready", flush=True)
        last = None
        while last is None or len(waits) < last:
            if select.select([sys.stdin] if last is None else [], [], [], PERIOD)[0]:
                last = len(waits) + LAST_INFERS
            started = time.monotonic()
            try:
                infer(request, timeout=DEADLINE)
            except grpc.RpcError as error:
                errors.append(repr(error))
            waits.append(time.monotonic() - started)
            if len(waits) % INFERS_PER_LIVE == 1:
                started = time.monotonic()
                try:
                    connection.request("GET", "/v2/health/live")
                    response = connection.getresponse()
                    response.read()
                    if response.status != 200:
                        errors.append(f"live: {response.status}")
                except (OSError, http.client.HTTPException) as error:
                    connection.close()
                    errors.append(f"live: {error!r}")
                live_waits.append(time.monotonic() - started)
    print(json.dumps({"waits": waits, "live_waits": live_waits, "errors": errors}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
