"""Clients of the HTTP door that lie: each is told so, and the server goes on serving."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve

INPUT = b'{"inputs":[{"name":"INPUT0","shape":%s,"datatype":%s,"data":%s}]}'

PATH = "/v2/models/identity/infer"

HOSTILE: dict[str, tuple[bytes, dict[str, str], int, str]] = {
    "malformed JSON": (b"{", {}, 500, "failed to parse the request JSON buffer: "),
    "a wrong type": (
        b'{"inputs":7}',
        {},
        500,
        "Unable to parse 'inputs': attempt to access JSON non-array as array",
    ),
    "a negative shape": (
        INPUT % (b"[-1]", b'"FP32"', b"[1]"),
        {},
        500,
        "Unable to parse 'shape': ",
    ),
    "an overflowing shape": (
        INPUT % (b"[4294967296,4294967296,4294967296]", b'"FP32"', b"[1]"),
        {},
        400,
        "invalid shape for input 'INPUT0': ",
    ),
    "an unknown datatype": (
        INPUT % (b"[1]", b'"FP33"', b"[1]"),
        {},
        400,
        "invalid datatype for input INPUT0",
    ),
    "deep JSON": (b"[" * 100_000, {}, 500, "failed to parse the request JSON buffer: "),
    "a header length beyond the body": (
        b"{}",
        {"Inference-Header-Content-Length": "99"},
        400,
        "inference header size should be in range (0, 2), got: 99",
    ),
    "a negative header length": (
        b"{}",
        {"Inference-Header-Content-Length": "-1"},
        400,
        "inference header size should be in range (0, 2), got: -1",
    ),
    "no gzip": (
        b"not gzip",
        {"Content-Encoding": "gzip"},
        400,
        "the request body cannot be decompressed: ",
    ),
}
"""Body, headers, status and the beginning of the error. What JSON cannot be read as is a 500
(protocol spec 0.4), never a failure of the server."""


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> Iterator[RunningHost]:
    """A host with the identity model."""
    module_repository.copy("identity")
    yield module_serve(module_repository)


def ask(
    host: RunningHost, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes]:
    """Status and body of the response to one request."""
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_request_is_refused_and_the_server_goes_on(host: RunningHost, case: str) -> None:
    body, headers, expected, beginning = HOSTILE[case]
    status, answer = ask(host, "POST", PATH, body, headers)
    assert status == expected
    assert json.loads(answer)["error"].startswith(beginning)
    assert ask(host, "GET", "/v2/health/ready", b"", {})[0] == 200


def test_an_unknown_route_is_not_found(host: RunningHost) -> None:
    assert ask(host, "GET", "/v2/nothing", b"", {})[0] == 404
