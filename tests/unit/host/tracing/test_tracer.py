"""Which requests are traced, and how long the tracer knows a trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from host.inference.request import InferRequest, InferResponse
from host.options.options import Options
from host.server.server import Server
from host.tracing.trace_settings import TIMESTAMPS, TraceConfig
from host.tracing.tracer import Tracer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.fixture
def tracer(path: Path) -> Iterator[Tracer]:
    tracer = Tracer(TraceConfig(frozenset([TIMESTAMPS]), rate=1, file=str(path)))
    yield tracer
    tracer.close()


def no_header(name: str) -> None:
    return None


def test_endpoints_get_no_tracer_while_tracing_is_off(path: Path) -> None:
    async def main() -> list[bool]:
        seen: list[bool] = []
        async with Server(
            Options(
                model_repository=[str(path.parent)],
                trace_config=[f"triton,file={path}"],
                allow_grpc=False,
                allow_http=False,
                allow_metrics=False,
            )
        ) as server:
            core = server.core
            seen.append(core.request_tracer is not None)
            core.trace_settings("", {"level": frozenset([TIMESTAMPS])})
            seen.append(core.request_tracer is not None)
            core.trace_settings("", {"level": None})
            seen.append(core.request_tracer is not None)
        return seen

    assert asyncio.run(main()) == [False, True, False]


def test_a_complete_trace_cannot_be_found(tracer: Tracer) -> None:
    trace = tracer.start_trace("m", no_header)
    assert trace is not None
    assert tracer.find_trace(trace.number) is trace
    child = trace.create_child()
    assert tracer.find_trace(child.number) is child
    trace.finish_response()
    assert tracer.find_trace(trace.number) is tracer.find_trace(child.number) is None
    assert tracer.find_trace(trace.create_child().number) is None


def test_a_trace_in_progress_is_written_after_its_setting_is_replaced(
    tracer: Tracer, path: Path
) -> None:
    trace = tracer.start_trace("m", no_header)
    assert trace is not None
    trace.start_inference(InferRequest("m", [], id="r"), "m", 1, 5)
    tracer.update_settings("", {"level": frozenset()})
    assert tracer.start_trace("m", no_header) is None
    trace.record_response(InferResponse("m", 1), True)
    trace.finish_response()
    tracer.close()
    head = json.loads(path.read_text())[0]
    assert head == {"id": 1, "model_name": "m", "model_version": 1, "request_id": "r"}


def test_a_file_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "no" / "traces"
    tracer = Tracer(TraceConfig(frozenset([TIMESTAMPS]), rate=1, file=str(path)))
    trace = tracer.start_trace("m", no_header)
    assert trace is not None
    trace.finish_response()
    tracer.close()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"traces cannot be written to '{path}': No such file or directory"
    )
