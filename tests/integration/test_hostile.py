"""Invalid and hostile requests at both endpoints get an error, and the server continues."""

from __future__ import annotations

import gzip
import http.client
import itertools
import json
import re
import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.clients import tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve

MOST = 1 << 20
"""The value of `--http-max-input-size`: small, so that small bodies exceed it."""
SLACK = 128 << 20
"""Bytes by which the server may grow over all these requests, which claim terabytes."""

PATH = "/v2/models/identity/infer"
NOTHING: Mapping[str, str] = {}


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> Iterator[RunningHost]:
    """A host with a model of numbers and one of strings; nothing unexpected happens in it."""
    module_repository.copy("identity", "script")
    host = module_serve(
        module_repository,
        "--model-control-mode=explicit",
        "--load-model=*",
        "--allow-client-shm=true",
        f"--http-max-input-size={MOST}",
    ).wait_started()
    before = psutil.Process(host.process.pid).memory_info().rss
    yield host
    assert psutil.Process(host.process.pid).memory_info().rss - before < SLACK
    assert "unexpected failure" not in host.output, host.output


@pytest.fixture(autouse=True)
def it_goes_on(host: RunningHost) -> Iterator[None]:
    """After each test both endpoints serve."""
    yield
    body = json.dumps({"inputs": [{**INPUT, "data": [1]}]}).encode()
    assert send_request(host, "POST", PATH, body)[0] == 200
    with host.client() as client:
        client.infer("identity", [tensor("INPUT0", np.ones(1, dtype=np.float32))])


def send_request(
    host: RunningHost,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] = NOTHING,
) -> tuple[int, bytes]:
    """Status and body of the response to one request."""
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        return response.status, response.read()


# Bodies of inference requests

INPUT: dict[str, Any] = {"name": "INPUT0", "shape": [1], "datatype": "FP32"}


def given(**members: Any) -> bytes:
    """The JSON of a request with one input of one number, but for these members of it."""
    return json.dumps({"inputs": [{**INPUT, "data": [1], **members}]}).encode()


def binary(size: int, data: bytes, **members: Any) -> tuple[bytes, dict[str, str]]:
    """A body whose JSON announces an input of `size` bytes, and which then has `data`."""
    entry = {**INPUT, **members, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [entry]}).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


def plain(body: bytes) -> tuple[bytes, dict[str, str]]:
    return body, {}


def packed(body: bytes, encoding: str = "gzip") -> tuple[bytes, dict[str, str]]:
    return body, {"Content-Encoding": encoding}


def of_length(text: str) -> tuple[bytes, dict[str, str]]:
    """A body whose JSON part is said to have this length."""
    return b"{}", {"Inference-Header-Content-Length": text}


NO_JSON = "failed to parse the request JSON buffer: "
NO_SHAPE = "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned"
NO_ROOM = f"exceeds the maximum allowed value of {MOST} bytes. Use --http-max-input-size to"
MISMATCH = "[request id: <id_unknown>] "

HOSTILE: dict[str, tuple[tuple[bytes, dict[str, str]], int, str]] = {
    # JSON
    "malformed JSON": (plain(b"{"), 500, NO_JSON),
    "no JSON": (plain(b"\xff\xfe\x00"), 500, NO_JSON + "Invalid value. at 0"),
    "nothing": (plain(b""), 500, NO_JSON + "The document is empty. at 0"),
    "two documents": (plain(b"{}{}"), 500, NO_JSON + "The document root must not be followed by"),
    "deep arrays": (plain(b"[" * 100_000), 500, NO_JSON),
    "deep objects": (plain(b'{"a":' * 100_000), 500, NO_JSON),
    "deep and closed": (plain(b'{"inputs":%b}' % (b"[" * 10**5 + b"]" * 10**5)), 400, "Input must"),
    "deep data": (
        plain(given(data=0).replace(b": 0", b": " + b"[" * 10**5 + b"1" + b"]" * 10**5)),
        400,
        "Unable to parse 'data': JSON nesting depth exceeds maximum allowed limit (100)",
    ),
    "an id that is no UTF-8": (plain(b'{"id":"\xff","inputs":[]}'), 500, "Unable to parse 'id': "),
    "half a surrogate pair": (plain(b'{"id":"\\ud800","inputs":[]}'), 500, NO_JSON),
    "a number of 5000 digits": (
        plain(b'{"inputs":[],"parameters":{"a":%b}}' % (b"9" * 5000)),
        500,
        NO_JSON + "Number too big to be stored in double.",
    ),
    # wrong types
    "a list as request": (plain(b"[]"), 500, "Unable to parse 'inputs': "),
    "a number as inputs": (plain(b'{"inputs":7}'), 500, "Unable to parse 'inputs': attempt to"),
    "an input that is nothing": (plain(b'{"inputs":[null]}'), 400, "Input must set only one of"),
    "a number as name": (plain(given(name=7)), 500, "Unable to parse 'name': attempt to access"),
    "a list as datatype": (plain(given(datatype=[])), 500, "Unable to parse 'datatype': attempt"),
    "an object as data": (plain(given(data={})), 500, "Unable to parse 'data': attempt to access"),
    "a string as number": (plain(given(data=["1"])), 500, "Unable to parse 'data': attempt to"),
    "a number as outputs": (plain(b'{"inputs":[],"outputs":7}'), 500, "Unable to parse 'outputs'"),
    "a list as parameters": (plain(b'{"inputs":[],"parameters":[]}'), 500, "failed to get request"),
    "two sources": (
        plain(given(parameters={"binary_data_size": 4})),
        400,
        "Input must set only one of the following fields: ",
    ),
    # shapes and datatypes
    "a negative shape": (plain(given(shape=[-1])), 500, NO_SHAPE),
    "a shape of fractions": (plain(given(shape=[1.0])), 500, NO_SHAPE),
    "a shape beyond 64 bits": (plain(given(shape=[2**64])), 500, NO_SHAPE),
    "a shape beyond 63 bits": (
        plain(given(shape=[2**63])),
        400,
        "invalid shape for input 'INPUT0'",
    ),
    "an overflowing shape": (plain(given(shape=[2**32] * 3)), 400, "invalid shape for input"),
    "a shape of too many bytes": (plain(given(shape=[2**62])), 400, "byte size overflow for input"),
    "a shape of much memory": (plain(given(shape=[2**40])), 400, "JSON input 'INPUT0' has a byte_"),
    "a shape of more": (plain(given(shape=[2])), 500, "Failed to parse 'data' field: shape does"),
    "a shape of less": (plain(given(data=[1, 2])), 500, "Unable to parse 'data': Shape does not"),
    "an unknown datatype": (
        plain(given(datatype="FP33")),
        400,
        "invalid datatype for input INPUT0",
    ),
    "bytes of an unknown datatype": (
        binary(4, b"1234", datatype="FP33"),
        400,
        MISMATCH + "inference input 'INPUT0' data-type is '<invalid>', but model 'identity' expe",
    ),
    "bytes of a negative shape": (
        binary(4, b"1234", shape=[2**63]),
        400,
        "tensor 'INPUT0' contains an invalid dimension [-9223372036854775808]",
    ),
    "bytes of an overflowing shape": (
        binary(4, b"1234", shape=[2**62]),
        400,
        "byte size for tensor 'INPUT0' exceeds maximum size of 9223372036854775807",
    ),
    # bytes
    "truncated bytes": (
        binary(4, b"12"),
        400,
        "unexpected size for input 'INPUT0', expecting 2 additional bytes for model 'identity'",
    ),
    "bytes that are not there": (binary(2**64 - 1, b""), 400, "unexpected size for input 'INPUT0'"),
    "trailing bytes": (binary(4, b"12345"), 400, "unexpected additional input data for model"),
    "bytes of another size": (binary(3, b"123"), 400, MISMATCH + "input byte size mismatch for"),
    "a negative size": (binary(-1, b""), 500, "Unable to parse 'binary_data_size': attempt to"),
    "a size beyond 64 bits": (binary(2**70, b""), 500, "Unable to parse 'binary_data_size': "),
    # lengths
    "a header length beyond the body": (
        of_length("99"),
        400,
        "inference header size should be in range (0, 2), got: 99",
    ),
    "a negative header length": (
        of_length("-1"),
        400,
        "inference header size should be in range (0, 2), got: -1",
    ),
    "a header length that is no number": (
        of_length("2.0"),
        400,
        "Unable to parse Inference-Header-Content-Length, got: 2.0",
    ),
    "a header length of 5000 digits": (
        of_length("9" * 5000),
        400,
        "Unable to parse Inference-Header-Content-Length, value is out of range [ -2147483648, 2",
    ),
    "a header that ends within the JSON": (
        (given(), {"Inference-Header-Content-Length": "20"}),
        500,
        NO_JSON,
    ),
    # compressed
    "no gzip": (packed(b"not gzip"), 400, "the request body cannot be decompressed: "),
    "half of a gzip": (packed(gzip.compress(given())[:-9]), 400, "the request body cannot be deco"),
    "gzip with a wrong sum": (
        packed(gzip.compress(given())[:-8] + bytes(8)),
        400,
        "the request body cannot be decompressed: ",
    ),
    "nothing as gzip": (packed(b""), 400, "nothing to be decompressed"),
    "a gzip bomb": (packed(gzip.compress(bytes(8 * MOST))), 400, "Decompressed data size exceeds"),
    "a deflate bomb": (packed(zlib.compress(bytes(8 * MOST)), "deflate"), 400, "Decompressed data"),
    "a gzip of deep JSON": (packed(gzip.compress(b"[" * 1_000_000)), 500, NO_JSON),
    "an unknown encoding": (packed(b"{}", "br"), 501, "Unsupported compression type"),
    "two encodings": (packed(b"{}", "gzip, gzip"), 501, "Unsupported compression type"),
    # sizes
    "much JSON": (plain(b" " * (MOST + 1)), 400, f"request JSON size of {MOST + 1} bytes exceeds"),
    "a long raw input": (
        (bytes(MOST + 4), {"Inference-Header-Content-Length": "0"}),
        400,
        "Raw in",
    ),
}
"""Body and headers, status and the beginning of the error. JSON of a wrong form gets status 500
(docs/reference/protocol.md, "JSON over HTTP"), and the server continues to work."""


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_body_is_refused(host: RunningHost, case: str) -> None:
    (body, headers), expected, beginning = HOSTILE[case]
    status, answer = send_request(host, "POST", PATH, body, headers)
    assert (status, json.loads(answer)["error"][: len(beginning)]) == (expected, beginning)


TEXTS = {
    "a cut length": (b"\4\0\0", "incomplete string length indicator for inference input 'COMMAND'"),
    "a cut text": (b"\4\0\0\0abc", "incomplete string data for inference input 'COMMAND'"),
    "a text of 4 GiB": (b"\xff\xff\xff\xffabc", "incomplete string data for inference input"),
    "two texts for one": (b"\0\0\0\0" * 2, "unexpected number of string elements 2 for inference"),
    "no text for one": (b"", "expected 1 string elements for inference input 'COMMAND'"),
}
"""The bytes of a tensor of one text, and the beginning of the error but for the request's id."""


@pytest.mark.parametrize("case", TEXTS)
def test_strings_with_a_wrong_length_are_rejected(host: RunningHost, case: str) -> None:
    data, beginning = TEXTS[case]
    body, headers = binary(len(data), data, name="COMMAND", datatype="BYTES")
    status, answer = send_request(host, "POST", "/v2/models/script/infer", body, headers)
    text = json.loads(answer)["error"].removeprefix(MISMATCH)
    assert (status, text[: len(beginning)]) == (400, beginning)


# Streams of bytes that are hardly HTTP

Answer = tuple[int, bytes, bytes]
"""Status, head and body."""

LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"


def post(headers: bytes, body: bytes = b"") -> bytes:
    """An inference request with these lines of headers."""
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n%b" % (PATH.encode(), headers, body)


def chunked(body: bytes) -> bytes:
    return post(b"transfer-encoding: chunked\r\n", body)


def converse(host: RunningHost, parts: Iterable[bytes], count: int) -> list[Answer]:
    """The first `count` responses; fewer if the server ends the connection first."""
    address, port = host.http_url.split(":")
    answers: list[Answer] = []
    with socket.create_connection((address, int(port)), timeout=DEADLINE) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server reads no more; its responses can still be read
        received = b""
        while len(answers) < count:
            answer = _first(received)
            if answer is None:
                try:
                    data = connection.recv(1 << 16)
                except ConnectionResetError:
                    break
                if not data:
                    break
                received += data
                continue
            answers.append(answer)
            received = received[len(answer[1]) + 4 + len(answer[2]) :]
    return answers


def _first(received: bytes) -> Answer | None:
    head, end, rest = received.partition(b"\r\n\r\n")
    if not end:
        return None
    length = re.search(rb"content-length: (\d+)", head)
    size = int(length[1]) if length else 0
    return (int(head.split()[1]), head, rest[:size]) if len(rest) >= size else None


BROKEN: dict[str, tuple[bytes, int]] = {
    "two Content-Lengths": (post(b"content-length: 2\r\ncontent-length: 3\r\n"), 400),
    "a list of Content-Lengths": (post(b"content-length: 2, 2\r\n"), 400),
    "a negative Content-Length": (post(b"content-length: -2\r\n"), 400),
    "a Content-Length with a sign": (post(b"content-length: +2\r\n"), 400),
    "a hexadecimal Content-Length": (post(b"content-length: 0x2\r\n"), 400),
    "a Content-Length of 23 digits": (post(b"content-length: %b\r\n" % (b"9" * 23)), 400),
    "a space before the colon": (post(b"content-length : 2\r\n"), 400),
    "a folded header": (post(b"x-a: b\r\n c\r\n"), 400),
    "NUL in a header": (post(b"x-a: b\0c\r\n"), 400),
    "NUL in a path": (b"GET /v2/models/\0/ready HTTP/1.1\r\n\r\n", 400),
    "an unknown transfer coding": (post(b"transfer-encoding: gzip\r\n"), 501),
    "two transfer codings": (post(b"transfer-encoding: gzip, chunked\r\n"), 501),
    "chunks of chunks": (post(b"transfer-encoding: chunked, chunked\r\n"), 400),
    "a misspelt transfer coding": (post(b"transfer-encoding: xchunked\r\n"), 501),
    "a chunk size that is no number": (chunked(b"zz\r\n{}\r\n0\r\n\r\n"), 400),
    "a negative chunk size": (chunked(b"-2\r\n{}\r\n0\r\n\r\n"), 400),
    "a chunk size beyond 64 bits": (chunked(b"f" * 18 + b"\r\n{}\r\n0\r\n\r\n"), 400),
    "a chunk that is longer than it says": (chunked(b"1\r\n{}\r\n0\r\n\r\n"), 400),
    "lines that end with LF": (b"GET /v2/health/live HTTP/1.1\nhost: x\n\n", 400),
    "chunk sizes that end with LF": (chunked(b"2\n{}\n0\n\n"), 400),
    "no HTTP": (b"\x16\x03\x01\x02\x00 hello\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "a version that is none": (b"GET /v2/health/live HTTP/1.2\r\n\r\n", 400),
    "a path of 200 KB": (b"GET /v2/models/%b/ready HTTP/1.1\r\n\r\n" % (b"a" * 200_000), 431),
    "a header of 200 KB": (post(b"x-a: %b\r\n" % (b"b" * 200_000)), 431),
    "a name of 200 KB": (post(b"%b: x\r\n" % (b"b" * 200_000)), 431),
    "endless headers": (post(b"x-a: bcdefghijklmnopqrstuvwxyz\r\n" * 400_000), 431),
    "endless trailers": (chunked(b"2\r\n{}\r\n0\r\n" + b"x-a: b\r\n" * 2_000_000), 431),
    "an endless trailer": (chunked(b"2\r\n{}\r\n0\r\nx-a: " + b"b" * 20_000_000), 431),
    "an endless extension of a chunk": (chunked(b"2;a=" + b"b" * 20_000_000), 431),
}
"""The bytes sent, and the expected status. The connection ends with that response."""


@pytest.mark.parametrize("case", BROKEN)
def test_malformed_http_closes_the_connection(host: RunningHost, case: str) -> None:
    data, expected = BROKEN[case]
    answers = converse(host, [data], 3)
    assert [status for status, _, _ in answers] == [expected]
    assert b"\r\nconnection: close" in answers[0][1]
    assert json.loads(answers[0][2])["error"]


UNUSUAL: dict[str, tuple[bytes, list[int]]] = {
    "requests at once": (LIVE * 3, [200] * 3),
    "many requests that propose another protocol": (
        LIVE.replace(b"host: x", b"connection: upgrade\r\nupgrade: h2c") * 3000,
        [200] * 3000,
    ),
    "a body that is not read": (
        post(b"content-length: 6\r\ncontent-encoding: br\r\n", b"GET / "),
        [501],
    ),
    "a chunked body with trailers": (
        chunked(b"2;a=b\r\n{}\r\n0\r\ninference-header-content-length: 77\r\n\r\n"),
        [500],  # that the inputs are missing: trailers are no headers
    ),
    "another host in the target": (LIVE.replace(b"/v2", b"http://a.b/v2", 1), [200]),
    "a target without a path": (LIVE.replace(b"/v2/health/live", b"http://a.b", 1), [404]),
    "a proxy's method": (b"CONNECT a.b:1 HTTP/1.1\r\nhost: x\r\n\r\n", [404]),
    "options of everything": (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", [404]),
    "options": (b"OPTIONS /v2 HTTP/1.1\r\nhost: x\r\n\r\n", [405]),
    "trace": (b"TRACE /v2 HTTP/1.1\r\nhost: x\r\n\r\n", [405]),
    "an escaped slash": (LIVE.replace(b"health/live", b"models/a%2Fb/ready"), [404]),
    "an escaped NUL": (LIVE.replace(b"health/live", b"models/%00/ready"), [404]),
    "bytes that are no UTF-8": (LIVE.replace(b"health/live", b"models/%ff%zz/ready"), [404]),
    "dots": (LIVE.replace(b"health/live", b"../../etc/passwd"), [404]),
    "a long path": (LIVE.replace(b"health/live", b"models/%b/ready" % (b"a" * 60_000)), [404]),
    "a version of 5000 digits": (
        LIVE.replace(b"health/live", b"models/identity/versions/" + b"9" * 5000),
        [400],
    ),
    "an expectation that missing knows": (LIVE.replace(b"host: x", b"expect: more"), [200]),
    "a body that waits to be wanted": (
        post(b"content-length: 2\r\nexpect: 100-continue\r\n", b"{}"),
        [100, 500],
    ),
}
"""The bytes sent, and the expected statuses. The connection stays open."""


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_requests_are_answered_and_the_next_one_as_well(
    host: RunningHost, case: str
) -> None:
    data, expected = UNUSUAL[case]
    answers = converse(host, [data, LIVE], len(expected) + 1)
    assert [status for status, _, _ in answers] == [*expected, 200]


def test_requests_before_a_broken_one_are_answered(host: RunningHost) -> None:
    index = b"POST /v2/repository/index HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    answers = converse(host, [index + LIVE + b"RUBBISH\r\n\r\n"], 4)
    assert [status for status, _, _ in answers] == [200, 200, 400]
    assert json.loads(answers[0][2])[0]["name"] == "identity"
    assert b"\r\nconnection: close" not in answers[1][1]
    assert b"\r\nconnection: close" in answers[2][1]


def test_a_request_with_a_broken_body_does_not_disturb_the_one_before(host: RunningHost) -> None:
    answers = converse(host, [LIVE + chunked(b"2\r\n{}RUBBISH")], 3)
    assert [status for status, _, _ in answers] == [200, 400]


def test_data_after_the_last_request_is_ignored(host: RunningHost) -> None:
    last = LIVE.replace(b"host: x", b"connection: close")
    answers = converse(host, [last + LIVE], 2)
    assert [status for status, _, _ in answers] == [200]
    assert b"\r\nconnection: close" in answers[0][1]


CHUNKS, LENGTH = b"transfer-encoding: chunked\r\n", b"content-length: 4\r\n"
UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"


@pytest.mark.parametrize(
    "headers",
    [LENGTH + CHUNKS, CHUNKS + LENGTH, CHUNKS + LENGTH + UPGRADE],
    ids=["length first", "chunks first", "with an upgrade"],
)
@pytest.mark.parametrize("rest", [LIVE, b"RUBBISH\r\n\r\n"], ids=["a request", "rubbish"])
def test_chunks_count_and_a_length_beside_them_ends_the_connection(
    host: RunningHost, headers: bytes, rest: bytes
) -> None:
    answers = converse(host, [post(headers, b"2\r\n{}\r\n0\r\n\r\n" + rest)], 2)
    assert [status for status, _, _ in answers] == [500]  # what follows could be smuggled
    assert b"\r\nconnection: close" in answers[0][1]
    assert "object member 'inputs'" in json.loads(answers[0][2])["error"]


def test_http_1_0_ends_with_the_answer(host: RunningHost) -> None:
    asked = b"GET /v2/health/live HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"
    (answer,) = converse(host, [asked], 2)
    assert answer[0] == 200
    assert b"\r\nconnection: close" in answer[1]


def test_head_is_not_allowed_and_has_no_body(host: RunningHost) -> None:
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        for _ in range(2):  # a body would be taken for the next answer
            connection.request("HEAD", "/v2/health/live")
            response = connection.getresponse()
            assert (response.status, response.read()) == (405, b"")


# Bodies that are too large are not read


@pytest.mark.parametrize("encoding", ["", "content-encoding: gzip\r\n"], ids=["plain", "gzip"])
def test_a_too_large_content_length_is_rejected_before_the_body(
    host: RunningHost, encoding: str
) -> None:
    (answer,) = converse(host, [post(b"content-length: 2147483647\r\n" + encoding.encode())], 1)
    assert answer[0] == 400
    assert b"--http-max-input-size" in answer[2]


@pytest.mark.parametrize("size", [2**31, 2**63, 2**64 - 1])
def test_a_content_length_beyond_32_bits_is_refused_before_the_body_comes(
    host: RunningHost, size: int
) -> None:
    (answer,) = converse(host, [post(b"content-length: %d\r\n" % size)], 1)
    assert answer[0] == 400
    assert json.loads(answer[2])["error"] == (
        f"Unable to parse Content-Length, value is out of range [ -2147483648, 2147483647 ],"
        f" got: {size}"
    )


def test_expect_continue_is_refused_for_a_too_large_body(
    host: RunningHost,
) -> None:
    answers = converse(host, [post(b"content-length: 2147483647\r\nexpect: 100-continue\r\n")], 2)
    assert [status for status, _, _ in answers] == [400]
    # The next bytes of the client could be the body, or another request.
    assert b"\r\nconnection: close" in answers[0][1]


def test_an_endless_body_is_rejected_at_the_size_limit(host: RunningHost) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    parts = itertools.chain([chunked(b"")], itertools.repeat(chunk, 100), [b"0\r\n\r\n", LIVE])
    answers = converse(host, parts, 2)
    assert [status for status, _, _ in answers] == [400, 200]
    assert b"--http-max-input-size" in answers[0][2]


def test_too_many_chunks_are_rejected(host: RunningHost) -> None:
    (answer,) = converse(host, [chunked(b"1\r\n \r\n" * 65537)], 2)
    assert answer[0] == 400
    assert json.loads(answer[2])["error"] == (
        "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger"
        " HTTP chunks."
    )


# The other endpoints

REGION = "/v2/systemsharedmemory/region/r/register"
LOAD = "/v2/repository/models/missing/load"
NOT_POLLED = "failed to load '{}', failed to poll from model repository"


def overridden(**parameters: object) -> bytes:
    return json.dumps({"parameters": parameters}).encode()


ELSEWHERE: dict[str, tuple[str, bytes, int, str]] = {
    "an index of what": ("/v2/repository/index", b'{"ready":7}', 400, "Invalid value for 'ready'"),
    "a model out of its folder": (
        "/v2/repository/models/..%2F..%2Fetc/load",
        b"",
        400,
        "invalid model name '../../etc', model name must not contain path traversal characters",
    ),
    "a model with NUL": ("/v2/repository/models/a%00/load", b"", 500, NOT_POLLED.format("a\0")),
    "a long name": (
        f"/v2/repository/models/{'a' * 5000}/load",
        b"",
        500,
        NOT_POLLED.format("a" * 5000),
    ),
    "parameters that are none": (LOAD, b'{"parameters":7}', 500, "attempt to get members for non-"),
    "an unknown parameter": (LOAD, overridden(x="y"), 500, "unexpected error on creating Triton"),
    "a number as configuration": (LOAD, overridden(config=7), 500, "attempt to access JSON non-st"),
    "a deep configuration": (
        LOAD,
        overridden(config="[" * 10**5),
        500,
        NOT_POLLED.format("missing"),
    ),
    "a file elsewhere": (
        LOAD,
        overridden(**{"config": "{}", "file:../../x": "eA=="}),
        500,
        NOT_POLLED[:14],
    ),
    "a file with NUL": (
        LOAD,
        overridden(**{"config": "{}", "file:\0": "eA=="}),
        500,
        NOT_POLLED[:14],
    ),
    "a file with a long name": (
        LOAD,
        overridden(**{"config": "{}", f"file:1/{'a' * 5000}": "eA=="}),
        500,
        NOT_POLLED[:14],
    ),
    "a file that is a folder": (
        LOAD,
        overridden(**{"config": "{}", "file:1": "eA==", "file:1/a": ""}),
        500,
        NOT_POLLED[:14],
    ),
    "a file that is no base64": (
        LOAD,
        overridden(**{"config": "{}", "file:1/a": "x"}),
        400,
        "load parameter 'file:1/a' must",
    ),
    "a region without a key": (REGION, b"{}", 400, "Shared memory register request has no 'key'"),
    "a region with NUL": (
        REGION,
        b'{"key":"a\\u0000b","byte_size":4}',
        500,
        "Unable to open shared memory region: 'a",
    ),
    "a region with a long name": (
        REGION,
        b'{"key":"%b","byte_size":4}' % (b"a" * 5000),
        500,
        "Unable to open shared memory",
    ),
    "a region in a folder": (
        REGION,
        b'{"key":"a/../../b","byte_size":4}',
        500,
        "Unable to open shared memory region: ",
    ),
    "a negative region": (
        REGION,
        b'{"key":"a","byte_size":-1}',
        500,
        "attempt to access JSON non-unsigned-integer",
    ),
    "a rate of 5000 digits": (
        "/v2/trace/setting",
        b'{"trace_rate":"%b"}' % (b"9" * 5000),
        400,
        "Unable to parse 'trace_r",
    ),
    "a rate of other digits": (
        "/v2/trace/setting",
        '{"trace_rate":"٢"}'.encode(),
        400,
        "Unable to parse 'trace_rate', go",
    ),
    "levels that are none": (
        "/v2/trace/setting",
        b'{"trace_level":[["OFF"]]}',
        500,
        "attempt to access JSON non-string",
    ),
    "a log level of 64 bits": (
        "/v2/logging",
        b'{"log_verbose_level":4294967296}',
        500,
        "attempt to access JSON non-unsign",
    ),
    "generating from nothing": ("/v2/models/identity/generate", b"", 500, NO_JSON),
    "generating from a list": (
        "/v2/models/identity/generate",
        b"[]",
        500,
        "attempt to get members",
    ),
    "generating from an object": (
        "/v2/models/identity/generate",
        b'{"INPUT0":{}}',
        500,
        "Unable to parse 'data': attempt to",
    ),
    "generating too much": (
        "/v2/models/identity/generate",
        b" " * (MOST + 1),
        400,
        "request JSON size of",
    ),
}
"""Path, body, status and the beginning of the error."""


@pytest.mark.parametrize("case", ELSEWHERE)
def test_other_endpoints_reject_hostile_bodies(host: RunningHost, case: str) -> None:
    path, body, expected, beginning = ELSEWHERE[case]
    status, answer = send_request(host, "POST", path, body)
    assert (status, json.loads(answer)["error"][: len(beginning)]) == (expected, beginning)


# The other endpoint


def infer_request(raw: tuple[bytes, ...] = (b"1234",), **members: Any) -> pb.ModelInferRequest:
    entry = pb.ModelInferRequest.InferInputTensor(**{**INPUT, **members})
    return pb.ModelInferRequest(model_name="identity", inputs=[entry], raw_input_contents=raw)


INVALID = grpc.StatusCode.INVALID_ARGUMENT
INTERNAL = grpc.StatusCode.INTERNAL

OVER_GRPC: dict[str, tuple[str, Any, grpc.StatusCode, str]] = {
    "a negative shape": (
        "ModelInfer",
        infer_request(shape=[-1]),
        INVALID,
        MISMATCH + "All input dimensions should be spec",
    ),
    "a shape of too many bytes": (
        "ModelInfer",
        infer_request(shape=[2**62]),
        INVALID,
        "byte size for tensor 'INPUT0' exceeds maximu",
    ),
    "an overflowing shape": (
        "ModelInfer",
        infer_request(shape=[2**40, 2**40]),
        INVALID,
        MISMATCH + "unexpected shape for input",
    ),
    "a shape of many dimensions": (
        "ModelInfer",
        infer_request(shape=[1] * 10_000),
        INVALID,
        MISMATCH + "unexpected shape for input",
    ),
    "truncated bytes": (
        "ModelInfer",
        infer_request((b"1",)),
        INVALID,
        MISMATCH + "input byte size mismatch for input",
    ),
    "no bytes": (
        "ModelInfer",
        infer_request(()),
        INVALID,
        "unable to find data for input tensor 'INPUT0'",
    ),
    "an unknown datatype": (
        "ModelInfer",
        infer_request(datatype="\0"),
        INVALID,
        MISMATCH + "inference input 'INPUT0' data-typ",
    ),
    "a cut text": (
        "ModelInfer",
        pb.ModelInferRequest(
            model_name="script",
            inputs=[
                pb.ModelInferRequest.InferInputTensor(name="COMMAND", datatype="BYTES", shape=[1])
            ],
            raw_input_contents=[b"\xff\xff\xff\xffabc"],
        ),
        INVALID,
        MISMATCH + "incomplete string data for inference input 'COMMAND'",
    ),
    "a version of 5000 digits": (
        "ModelMetadata",
        pb.ModelMetadataRequest(name="identity", version="9" * 5000),
        INVALID,
        "failed to get model version from specified version string '9999",
    ),
    "a model out of its folder": (
        "RepositoryModelLoad",
        pb.RepositoryModelLoadRequest(model_name="../x"),
        INVALID,
        "invalid",
    ),
    "a model with NUL": (
        "RepositoryModelLoad",
        pb.RepositoryModelLoadRequest(model_name="a\0"),
        INTERNAL,
        NOT_POLLED.format("a\0"),
    ),
    "a long name": (
        "RepositoryModelLoad",
        pb.RepositoryModelLoadRequest(model_name="a" * 5000),
        INTERNAL,
        NOT_POLLED.format("a" * 5000),
    ),
    "a region with NUL": (
        "SystemSharedMemoryRegister",
        pb.SystemSharedMemoryRegisterRequest(name="r", key="a\0b", byte_size=2**64 - 1),
        INTERNAL,
        "Unable to open shared memory region: 'a\0b'",
    ),
    "a rate of 5000 digits": (
        "TraceSetting",
        pb.TraceSettingRequest(
            settings={"trace_rate": pb.TraceSettingRequest.SettingValue(value=["9" * 5000])}
        ),
        INVALID,
        "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 999",
    ),
}
"""Method, request, status and the beginning of the error."""


@pytest.mark.parametrize("case", OVER_GRPC)
def test_hostile_messages_are_refused(host: RunningHost, case: str) -> None:
    method, request, code, beginning = OVER_GRPC[case]
    with grpc.insecure_channel(host.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            getattr(stub, method)(request, timeout=DEADLINE)
    details = caught.value.details()
    assert details is not None
    assert (caught.value.code(), details[: len(beginning)]) == (code, beginning)
