"""Measures the parts of one request separately.

    python -m benchmarks.micro [options of pyperf, such as --fast or -o FILE]
    python -m benchmarks.micro --instructions

Times are measured with pyperf. `--instructions` counts instructions with callgrind (valgrind). The
count does not depend on what else the machine does, so two commits can be compared.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tritonclient.grpc import service_pb2 as pb

from host.frontends.grpc.infer_request import parse_infer_request, to_request
from host.frontends.grpc.infer_response import encode_infer_response
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse, Tensor
from host.instances.regions import Regions
from host.scheduling.direct import DirectScheduler
from host.scheduling.dynamic import DynamicScheduler
from host.scheduling.scheduler import InstanceSlot, LoopClock
from stub.wire import messages as m
from stub.wire.arena import Arena, file_size
from stub.wire.messages import WireRequest, WireTensor
from stub.wire.ring import RingReader, RingWriter, create_ring_file, map_ring

Operation = Callable[[], object]

_NO_REGIONS = Regions(None)
_SMALL = bytes(64)
_LARGE = bytes(1 << 20)
_COUNTED = 400  # operations whose instructions are counted, after a warm-up of as many


def _message(data: bytes) -> bytes:
    request = pb.ModelInferRequest(model_name="identity", id="7")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[len(data) // 4])
    request.outputs.add(name="OUTPUT0")
    request.raw_input_contents.append(data)
    return bytes(request.SerializeToString())


def _decode() -> Operation:
    data = _message(_SMALL)
    return lambda: to_request(parse_infer_request(data), _NO_REGIONS)


def _encode() -> Operation:
    response = InferResponse("identity", 1, outputs=[Tensor("OUTPUT0", "FP32", [16], _SMALL)])
    return lambda: encode_infer_response(response)


def _frame() -> Operation:
    request = WireRequest("7", [WireTensor("INPUT0", 11, [16], _SMALL)], ["OUTPUT0"], {})
    return lambda: m.decode_to_stub(m.encode([m.Execute(1, [request])]))


def _ring() -> Operation:
    memory = map_ring(create_ring_file("pbhost-benchmark", 1), 0)
    writer, reader = RingWriter(memory), RingReader(memory, -1)
    frame = bytes(200)

    def pass_on() -> None:
        reader.announced += writer.write(frame)
        reader.read_frame()

    return pass_on


def _arena() -> Operation:
    limit = 64 << 20
    fd = os.memfd_create("pbhost-benchmark", os.MFD_CLOEXEC)
    os.truncate(fd, file_size(limit))
    arena, data = Arena(1, fd, limit), memoryview(_LARGE)
    return lambda: arena.write(data)


class _FakeInstance(InstanceSlot):
    """An instance that answers its batch when `finish` is called."""

    def __init__(self, scheduler: DirectScheduler | DynamicScheduler) -> None:
        self.scheduler = scheduler
        self.calls: Sequence[Call] = ()

    def run(self, calls: Sequence[Call]) -> None:
        self.calls = calls

    def drain_prefetched(self) -> Sequence[Call]:
        return ()

    def finish(self) -> None:
        for call in self.calls:
            call.respond(InferResponse("m", 1))
        self.scheduler.instance_ready(self)


def _direct() -> Operation:
    scheduler = DirectScheduler()
    instance = _FakeInstance(scheduler)
    scheduler.instance_ready(instance)

    def one() -> None:
        scheduler.submit(Call(InferRequest("m", [])))
        instance.finish()

    return one


class _ReadingClock(LoopClock):
    """Calls back at once, without an event loop, as if nothing else had arrived."""

    def call_after_reading(self, callback: Callable[[], None]) -> None:
        callback()


def _dynamic() -> Operation:
    scheduler = DynamicScheduler(16, 0, lambda first, other: True, clock=_ReadingClock())
    instance = _FakeInstance(scheduler)
    scheduler.instance_ready(instance)

    def seventeen() -> None:
        for _ in range(17):  # the first one runs alone, the others as one batch
            scheduler.submit(Call(InferRequest("m", [], batch_size=1)))
        instance.finish()
        instance.finish()

    return seventeen


OPERATIONS: dict[str, Callable[[], Operation]] = {
    "messages of gRPC: read a request": _decode,
    "messages of gRPC: encode a response": _encode,
    "messages of stubs: encode and decode a batch": _frame,
    "ring: put and take a frame": _ring,
    "arena: write 1 MB and drop it": _arena,
    "scheduler: one call, direct": _direct,
    "scheduler: 17 calls, dynamic": _dynamic,
}


def instructions(name: str) -> float:
    """Instructions per operation: a long run minus a run of half its length."""
    return (_counted(name, 2 * _COUNTED) - _counted(name, _COUNTED)) / _COUNTED


def _counted(name: str, operations: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                "valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out",
                sys.executable, "-m", "benchmarks.micro", "--run", name, str(operations),
            ],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "0"},
            cwd=Path(__file__).parents[1],
        )  # fmt: skip
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        operation = OPERATIONS[sys.argv[2]]()
        for _ in range(int(sys.argv[3])):
            operation()
    elif sys.argv[1:] == ["--instructions"]:
        for name in OPERATIONS:
            print(f"{name:36} {instructions(name):12,.0f} instructions", flush=True)
    else:
        import pyperf

        runner = pyperf.Runner(program_args=("-m", "benchmarks.micro"))
        for name, make in OPERATIONS.items():
            runner.bench_func(name, make())


if __name__ == "__main__":
    main()
