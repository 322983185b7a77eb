"""The encoding of messages: round trips, and refusal of invalid frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import msgspec.msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stub.wire import messages as m
from stub.wire.messages import (
    Parameter,
    TraceLink,
    WireError,
    WireRequest,
    WireResponse,
    WireTensor,
)
from stub.wire.spawn import SpawnArguments
from tests.unit.stub.samples import TO_HOST, TO_STUB

int64 = st.integers(-(1 << 63), (1 << 63) - 1)
unsigned = st.integers(0, (1 << 64) - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
parameters = st.dictionaries(
    text, st.one_of(st.booleans(), int64, st.floats(allow_nan=False), text), max_size=3
)
tensors = st.builds(
    WireTensor,
    text,
    st.integers(1, 14),
    st.lists(int64, max_size=4),
    st.none() | st.binary(max_size=50),
    unsigned,
    unsigned,
    unsigned,
)
requests = st.builds(
    WireRequest,
    text,
    st.lists(tensors, max_size=3),
    st.lists(text, max_size=2),
    parameters,
    st.one_of(unsigned, text),
    st.integers(0, 3),
    unsigned,
    text,
    st.integers(-1, 1 << 40),
    st.none() | st.builds(TraceLink, unsigned, st.none() | text),
)
errors = st.builds(WireError, st.integers(0, 7), text)
responses = st.builds(WireResponse, st.lists(tensors, max_size=3), parameters, st.none() | errors)
sources = st.builds(m.ModelSource, text, int64, text, text)
floats = st.floats(allow_nan=False)
indexes = st.lists(unsigned, max_size=3).map(tuple)
blocks = st.lists(st.tuples(unsigned, unsigned, unsigned), max_size=3)
block_releases = st.builds(m.BlockRelease, blocks)

to_stub: st.SearchStrategy[m.ToStub] = st.one_of(
    block_releases,
    st.builds(m.OpenArena, unsigned, text, unsigned),
    st.builds(m.CloseArena, unsigned),
    st.builds(m.AutoComplete, sources, text),
    st.builds(
        m.Initialize,
        text,
        sources,
        st.dictionaries(text, text, max_size=3),
        st.lists(text, max_size=2),
        st.booleans(),
        unsigned,
        unsigned,
        floats,
    ),
    st.builds(m.Execute, unsigned, st.lists(requests, max_size=3)),
    st.builds(m.BlsResponse, unsigned, st.none() | responses, st.booleans()),
    st.builds(m.CancelRequest, unsigned, unsigned),
    st.builds(m.ResponseAck, unsigned, unsigned, unsigned),
    st.builds(m.HostReply, unsigned, st.none() | text, st.none() | st.booleans() | int64 | floats),
    st.builds(m.CheckReady, unsigned),
    st.builds(m.DescribeStacks, unsigned),
    st.builds(m.Finalize),
)
to_host: st.SearchStrategy[m.ToHost] = st.one_of(
    block_releases,
    st.builds(m.Hello),
    st.builds(m.AutoCompleted, st.none() | text),
    st.builds(m.Initialized, st.booleans(), st.booleans()),
    st.builds(m.LoadFailed, text),
    st.builds(m.Response, unsigned, unsigned, st.none() | responses, st.booleans()),
    st.builds(
        m.BatchDone,
        *[unsigned] * 5,
        st.none() | text,
        indexes,
        indexes,
    ),
    st.builds(m.InstanceReleased, unsigned),
    st.builds(m.BatchReturned, unsigned),
    st.builds(m.BlsRequest, unsigned, requests, unsigned, st.booleans(), st.booleans()),
    st.builds(m.CancelBls, unsigned),
    st.builds(
        m.LoadModel, unsigned, text, text, st.dictionaries(text, st.binary(max_size=9), max_size=2)
    ),
    st.builds(m.UnloadModel, unsigned, text, st.booleans()),
    st.builds(m.IsModelReady, unsigned, text, text),
    st.builds(m.NewMetricFamily, unsigned, unsigned, text, text, st.integers(0, 2)),
    st.builds(
        m.NewMetric,
        unsigned,
        unsigned,
        unsigned,
        st.dictionaries(text, text, max_size=2),
        st.none() | st.lists(floats, max_size=3),
    ),
    st.builds(m.ChangeMetric, unsigned, text, floats),
    st.builds(m.ReadMetric, unsigned, unsigned),
    st.builds(m.DropMetrics, st.lists(unsigned, max_size=2), st.lists(unsigned, max_size=2)),
    st.builds(m.ReadinessResult, unsigned, st.booleans(), text),
    st.builds(m.Stacks, unsigned, st.lists(text)),
    st.builds(m.ImportedFiles, st.lists(st.tuples(text, unsigned, unsigned))),
    st.builds(m.ModelWarning, text),
    st.builds(m.LogLine, int64, text, int64, text),
    st.builds(m.Finalized, st.none() | text),
)


@given(st.lists(to_stub, max_size=4))
def test_messages_to_the_stub_round_trip(frame: list[m.ToStub]) -> None:
    assert m.decode_to_stub(m.encode(frame)) == frame


@given(st.lists(to_host, max_size=4))
def test_messages_to_the_host_round_trip(frame: list[m.ToHost]) -> None:
    assert m.decode_to_host(m.encode(frame)) == frame


def test_parameters_keep_their_types() -> None:
    values: dict[str, Parameter] = {"b": True, "i": 1, "f": 1.0, "s": "1"}
    frame = m.encode([m.BlsResponse(1, WireResponse([], values))])
    (answer,) = m.decode_to_stub(frame)
    assert isinstance(answer, m.BlsResponse)
    assert answer.response is not None
    assert [type(value) for value in answer.response.parameters.values()] == [bool, int, float, str]


DECODERS = (m.decode_to_stub, m.decode_to_host)

GARBAGE = {
    "nothing": b"",
    "a number": b"\x01",
    "a map": b"\x80",
    "a list of numbers": b"\x92\x01\x02",
    "a message of an unknown kind": msgspec.msgpack.encode([["NoSuchMessage", 1]]),
    "a list that is longer than the frame": b"\xdd\xff\xff\xff\xff",
    "text that is not UTF-8": b"\x91\x92\xa1\xff\x01",
    "two frames": m.encode([m.Initialized()]) * 2,
}


@pytest.mark.parametrize("frame", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("decode", DECODERS)
def test_garbage_is_refused(
    decode: Callable[[bytes], Sequence[m.ToStub | m.ToHost]], frame: bytes
) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(frame)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_are_what_they_decode_to(frame: bytes) -> None:
    for decode in DECODERS:
        try:
            messages = decode(frame)
        except msgspec.DecodeError:
            continue  # every other error fails the test
        assert len(messages) == len(msgspec.msgpack.decode(frame, type=list[msgspec.Raw]))
        again = m.encode(messages)  # compared as bytes, as NaN is not equal to itself
        assert m.encode(decode(again)) == again


@given(st.sampled_from(TO_HOST), st.data())
@settings(max_examples=300)
def test_damaged_frame_is_refused_or_decodes_to_one_message(
    message: m.ToHost, data: st.DataObject
) -> None:
    frame = bytearray(m.encode([message]))
    frame[data.draw(st.integers(1, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        (decoded,) = m.decode_to_host(bytes(frame))
    except msgspec.DecodeError:
        return  # every other error fails the test
    again = m.encode([decoded])
    assert m.encode(m.decode_to_host(again)) == again


@given(st.sampled_from(TO_HOST), st.data())
def test_frame_that_is_cut_off_is_refused(message: m.ToHost, data: st.DataObject) -> None:
    frame = m.encode([message])
    with pytest.raises(msgspec.DecodeError):
        m.decode_to_host(frame[: data.draw(st.integers(0, len(frame) - 1))])


@pytest.mark.parametrize("message", [one for one in TO_HOST if not isinstance(one, m.BlockRelease)])
def test_stub_refuses_messages_that_only_a_stub_sends(message: m.ToHost) -> None:
    with pytest.raises(msgspec.ValidationError):
        m.decode_to_stub(m.encode([message]))


@pytest.mark.parametrize("message", [one for one in TO_STUB if not isinstance(one, m.BlockRelease)])
def test_host_refuses_messages_that_only_the_host_sends(message: m.ToStub) -> None:
    with pytest.raises(msgspec.ValidationError):
        m.decode_to_host(m.encode([message]))


def test_spawn_arguments_round_trip_through_the_command_line() -> None:
    spawn = SpawnArguments("ipc:///tmp/ä b/host", "token", 'title "x"', *range(3, 13))
    assert SpawnArguments.load(spawn.dump()) == spawn
    assert spawn.descriptors == (3, 4, 5, 6, 7, 9, 11)
    assert spawn.arena_limit == 10
