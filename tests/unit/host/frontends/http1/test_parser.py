"""The parser of HTTP/1.1 requests: unusual first lines."""

from __future__ import annotations

import pytest

from host.frontends.http1.parser import MalformedRequest, RequestHead, RequestParser


class RecordingHandler:
    """Records the events of a parser."""

    def __init__(self) -> None:
        self.closing = False
        self.heads: list[RequestHead] = []
        self.ended = 0
        self.content = b""

    def on_request_begin(self) -> None:
        pass

    def on_head(self, head: RequestHead) -> None:
        self.heads.append(head)

    def on_chunk(self) -> None:
        pass

    def on_body(self, part: bytes) -> None:
        self.content += part

    def on_request_complete(self) -> None:
        self.ended += 1


def parsed(*parts: bytes) -> RecordingHandler:
    handler = RecordingHandler()
    parser = RequestParser(handler)
    for part in parts:
        parser.feed(part)
    return handler


def request(method: bytes, target: bytes, body: bytes = b"") -> bytes:
    return b"%b %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
        method, target, len(body), body,
    )  # fmt: skip


def only(handler: RecordingHandler) -> tuple[str, tuple[bytes, bytes]]:
    (head,) = handler.heads
    assert handler.ended == 1
    return head.method, head.split_url()


def test_bytes_that_are_not_ascii_are_percent_encoded() -> None:
    handler = parsed(request(b"GET", b"/v2/mod\xc3\xa8le?n=\xe9"))
    assert only(handler) == ("GET", (b"/v2/mod%C3%A8le", b"n=%E9"))


def test_a_fragment_is_part_of_the_path() -> None:
    assert only(parsed(request(b"GET", b"/a#b/c?d#e"))) == ("GET", (b"/a#b/c", b"d#e"))


@pytest.mark.parametrize("method", ["FOO", "PROPFIND", "get", "DESCRIBE", "PATCH", "A" * 60])
def test_an_unknown_method_is_parsed_like_a_known_one(method: str) -> None:
    assert only(parsed(request(method.encode(), b"/\xff", b"{}"))) == ("PATCH", (b"/%FF", b""))


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_other_methods_keep_their_names(method: str) -> None:
    assert only(parsed(request(method.encode(), b"/"))) == (method, (b"/", b""))


def test_a_first_line_can_arrive_byte_by_byte() -> None:
    data = request(b"POST", b"/\xc3\xa9", b"\xc3\xa9")
    handler = parsed(*(data[at : at + 1] for at in range(len(data))))
    assert only(handler) == ("POST", (b"/%C3%A9", b""))
    assert handler.content == b"\xc3\xa9"


@pytest.mark.parametrize("split", range(1, 90))
def test_only_the_first_line_is_changed(split: int) -> None:
    body = b"FOO /\xc3\xa9 HTTP/1.1\r\n\r\n"
    data = b"POST /\xc3\xa9 HTTP/1.1\r\nname: \xc3\xa9\r\ncontent-length: %d\r\n\r\n" % len(body)
    data += body
    handler = parsed(data[:split], data[split:])
    assert handler.heads[0].headers[0] == (b"name", b"\xc3\xa9")
    assert (handler.heads[0].url, handler.content, handler.ended) == (b"/%C3%A9", body, 1)


def test_the_first_line_of_every_request_is_normalized() -> None:
    first, second = request(b"FOO", b"/\xc3\xa9", b"\xff"), request(b"POST", b"/\xc3\xa8", b"x")
    handler = parsed(first, second)
    assert [(head.method, head.url) for head in handler.heads] == [
        ("PATCH", b"/%C3%A9"),
        ("POST", b"/%C3%A8"),
    ]


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01 hello\r\n\r\n", b"G\xc3T / HTTP/1.1\r\n\r\n", b"\xc3 / HTTP/1.1\r\n\r\n"],
    ids=["tls", "inside", "alone"],
)
def test_malformed_methods_are_rejected(data: bytes) -> None:
    with pytest.raises(MalformedRequest, match="Invalid method"):
        parsed(data)
