"""The HTTP listener with the metrics endpoint, over real connections."""

from __future__ import annotations

import asyncio
import http.client
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import TypeVar

import pytest

from host.errors import ErrorCode, HostError
from host.frontends.http.metrics_endpoint import MetricsApp
from host.frontends.http1.asgi import App, Message, Receive, Send
from host.frontends.http1.listener import HttpListener
from host.frontends.sockets import check_address, listening_socket
from host.metrics.families import MetricFamily, MetricKind
from tests.conftest import DEADLINE

_Result = TypeVar("_Result")

Answer = tuple[int, dict[str, str], str]


def send_request(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    """Returns status, headers and body of the response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    with closing(connection):
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        body = response.read().decode()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, body


def serving(app: App, work: Callable[[int, HttpListener], Awaitable[_Result]]) -> _Result:
    """Returns the result of `work`, called with the port of a listener and the listener."""

    async def main() -> _Result:
        listener = HttpListener(app, "127.0.0.1", 0)
        port = await listener.start()
        try:
            return await work(port, listener)
        finally:
            await listener.stop(DEADLINE)

    return asyncio.run(asyncio.wait_for(main(), DEADLINE))


def metrics() -> list[MetricFamily]:
    family = MetricFamily("answer", "h", MetricKind.GAUGE)
    family.add((), 42)
    return [family]


def scraped(path: str, method: str = "GET", **headers: str) -> Answer:
    async def work(port: int, _: HttpListener) -> Answer:
        return await asyncio.to_thread(send_request, port, path, method, **headers)

    return serving(MetricsApp(metrics), work)


# Address and port


def test_check_address_does_not_occupy_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HostError) as error:
            check_address("127.0.0.1", port)
        assert error.value.message == f"Socket '127.0.0.1:{port}' already in use "
    check_address("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), DEADLINE)
    listening_socket("127.0.0.1", port).close()


# The endpoint


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/metrics?name=answer"])
def test_metrics_are_at_their_path(path: str) -> None:
    status, headers, body = scraped(path)
    assert (status, headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert body == "# HELP answer h\n# TYPE answer gauge\nanswer 42\n"


def test_a_client_that_accepts_openmetrics_gets_it() -> None:
    _, headers, body = scraped("/metrics", accept="application/openmetrics-text")
    assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith("answer 42.0\n# EOF\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_metrics_support_only_get(method: str) -> None:
    status, headers, body = scraped("/metrics", method)
    assert (status, body) == (405, '{"error":"Method Not Allowed"}')
    assert (headers["allow"], headers["content-type"]) == ("GET", "application/json")


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/x"])
def test_other_paths_are_not_found(path: str) -> None:
    status, _, body = scraped(path)
    assert (status, body) == (404, f'{{"error":"Not found: {path}. Try /metrics"}}')


def test_a_scrape_that_fails_is_logged_and_the_next_one_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = [True]

    def sometimes() -> list[MetricFamily]:
        if failing.pop() if failing else False:
            raise RuntimeError("out of numbers")
        return metrics()

    async def work(port: int, _: HttpListener) -> list[Answer]:
        return [await asyncio.to_thread(send_request, port, "/metrics") for _ in range(2)]

    first, second = serving(MetricsApp(sometimes), work)
    assert (first[0], first[2]) == (500, '{"error":"unexpected failure: RuntimeError"}')
    assert second[0] == 200
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.getMessage() == "unexpected failure of a scrape"
    assert "out of numbers" in caplog.text


# The listener


def test_a_taken_port_is_refused() -> None:
    async def work(port: int, _: HttpListener) -> HostError:
        with pytest.raises(HostError) as error:
            await HttpListener(MetricsApp(metrics), "127.0.0.1", port).start()
        return error.value

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(HostError) as error:
            asyncio.run(HttpListener(MetricsApp(metrics), "127.0.0.1", port).start())
    assert error.value.code is ErrorCode.UNAVAILABLE
    assert error.value.message == f"Socket '127.0.0.1:{port}' already in use "
    refused = serving(MetricsApp(metrics), work)  # and by a listener of this host
    assert refused.message.endswith("already in use ")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(HostError) as error:
        asyncio.run(HttpListener(MetricsApp(metrics), "203.0.113.1", 0).start())
    assert error.value.code is ErrorCode.UNAVAILABLE
    assert error.value.message == (
        "Socket '203.0.113.1:0' cannot be opened: Cannot assign requested address"
    )


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["::1", "ipv6:[::1]"])
def test_an_ipv6_address_can_be_given(address: str) -> None:
    async def main() -> int:
        listener = HttpListener(MetricsApp(metrics), address, 0)
        port = await listener.start()
        reader, writer = await asyncio.open_connection("::1", port)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await listener.stop(DEADLINE)
        return int(answer.split()[1])

    assert asyncio.run(main()) == 200


def test_two_listeners_share_a_port_if_both_allow_it() -> None:
    async def main() -> bool:
        first = HttpListener(MetricsApp(metrics), "127.0.0.1", 0, reuse_port=True)
        port = await first.start()
        second = HttpListener(MetricsApp(metrics), "127.0.0.1", port, reuse_port=True)
        shared = await second.start() == port
        await first.stop(DEADLINE)
        await second.stop(DEADLINE)
        return shared

    assert asyncio.run(main())


class Slow:
    """An application that reports the start of a request and responds when it is told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.asked.set()
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"at last"})


def test_the_listener_finishes_running_requests_before_it_stops() -> None:
    app = Slow()

    async def work(port: int, listener: HttpListener) -> Answer:
        asking = asyncio.create_task(asyncio.to_thread(send_request, port, "/"))
        await app.asked.wait()
        stopping = asyncio.create_task(listener.stop(DEADLINE))
        await asyncio.sleep(0)  # the request has started
        app.go_on.set()
        await stopping
        return await asking

    status, _, body = serving(app, work)
    assert (status, body) == (200, "at last")


def test_idle_connections_do_not_delay_shutdown() -> None:
    async def work(port: int, listener: HttpListener) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"answer 42\n")
        await listener.stop(DEADLINE)
        rest = await reader.read()
        writer.close()
        return rest

    assert serving(MetricsApp(metrics), work) == b""


def test_a_request_that_exceeds_the_grace_period_is_cut_off() -> None:
    app = Slow()

    async def work(port: int, listener: HttpListener) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await app.asked.wait()
        await listener.stop(0)
        writer.close()
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""

    assert b"at last" not in serving(app, work)


def test_the_listener_does_not_change_signals_and_loggers() -> None:
    def state() -> list[object]:
        loggers = [logging.getLogger(name) for name in ("", "asyncio", "pbhost")]
        return [[*log.handlers, log.level, log.propagate, log.disabled] for log in loggers]

    async def work(port: int, _: HttpListener) -> object:
        await asyncio.to_thread(send_request, port, "/metrics")
        return signal.getsignal(signal.SIGTERM)

    before = state()
    assert serving(MetricsApp(metrics), work) == signal.getsignal(signal.SIGTERM)
    assert state() == before


def test_malformed_http_is_answered_with_an_error_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(port: int, _: HttpListener) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    answer = serving(MetricsApp(metrics), work)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"malformed HTTP request: " in answer
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
