"""The frames between the host and stubs, fed with any bytes."""

from __future__ import annotations

import msgspec

from host.inference.request import ExecutionTimes, Tensor
from host.lane import results_reader
from pb_utils._datatypes import NAMES
from stub.wire import messages as m
from stub.wire.messages import WireRequest, WireResponse, WireTensor

Results = tuple[int, list[list[Tensor]], ExecutionTimes]

_TENSOR = WireTensor("OUTPUT0", 11, [1, 300], bytes(8))
_READER = None if results_reader is None else results_reader(Tensor, ExecutionTimes, NAMES)

SEEDS = [
    m.encode(
        [
            *(m.Response(300, index, WireResponse([_TENSOR], {})) for index in range(2)),
            m.BatchDone(300, 10**14, 10**14, 10**14 + 1, 10**14 + 2),
        ]
    ),
    m.encode([m.Response(1, 0, WireResponse([], {"p": 1.5})), m.LogLine(1, "", 0, "text")]),
    m.encode([m.Execute(1, [WireRequest("7", [_TENSOR], ["OUTPUT0"], {"p": "é"})])]),
    m.encode([m.Hello(), m.InstanceReleased(1)]),
    m.encode([m.Finalize()]),
]


def read_in_python(frame: bytes) -> Results:
    """What the lane may return for a frame, from what Python decodes."""
    *responses, end = m.decode_to_host(frame)
    assert isinstance(end, m.BatchDone)
    assert (end.failure, end.deferred, end.rescheduled) == (None, (), ())
    assert 0 < end.started <= end.inputs_ready <= end.outputs_begin <= end.ended
    found: list[list[Tensor]] = []
    for index, message in enumerate(responses):
        assert isinstance(message, m.Response)
        assert (message.batch, message.index, message.final) == (end.batch, index, True)
        assert message.response is not None and message.response.error is None
        assert message.response.parameters == {}
        assert all(one.data is not None for one in message.response.outputs)
        found.append(
            [
                Tensor(t.name, NAMES[t.code], t.shape, t.data or b"")
                for t in message.response.outputs
            ]
        )
    times = ExecutionTimes(end.started, end.inputs_ready, end.outputs_begin, end.ended)
    return end.batch, found, times


def read_in_lane(frame: bytes) -> Results | None:
    """What the lane returns, which is what Python decodes, or None."""
    results = _READER.decode_results(frame) if _READER is not None else None
    assert results is None or results == read_in_python(frame)
    return results


def check(data: bytes, run: object = None) -> None:
    """A frame is messages, which are the same after they were sent on, or it cannot be decoded."""
    read_in_lane(data)
    for decode in (m.decode_to_host, m.decode_to_stub):
        try:
            messages = decode(data)
        except msgspec.DecodeError:
            continue
        sent = m.encode(messages)
        assert m.encode(decode(sent)) == sent
