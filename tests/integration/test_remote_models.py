"""Models that another server has: clients, models and ensembles call them as local ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import numpy as np
import pytest

import pbhost
from host.config.schema import new_config
from host.errors import unavailable
from host.inference.metadata import IndexEntry, ModelStatistics
from host.inference.request import InferRequest, InferResponse, Tensor
from host.remote_models import ResponseStream
from tests.conftest import DEADLINE, RepositoryBuilder
from tests.embedding_page import class_of_page
from tests.integration.ensemble_models import (
    CHAIN,
    COUNT,
    GATHER,
    LATE,
    add_ensemble,
    add_member,
)
from tests.integration.test_inprocess import options
from tests.otlp import Collector, Span, collecting
from tests.waiting import eventually

_Result = TypeVar("_Result")

NOTES = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        seen = {
            "id": request.request_id(),
            "parameters": json.loads(request.parameters()),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "outputs": list(request.requested_output_names()),
        }
        output = pb_utils.Tensor("SEEN", np.array([json.dumps(seen)], dtype=np.object_))
        return pb_utils.InferenceResponse([output], parameters={"by": "notes"})
"""
NOTES_CONFIG = """
output [{name: "SEEN", data_type: TYPE_STRING, dims: [1]}]
dynamic_batching {priority_levels: 5 default_priority_level: 3}
max_batch_size: 1
instance_group [{count: 1, kind: KIND_CPU}]
"""
READY = """
import triton_python_backend_utils as pb_utils
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        target = pb_utils.get_input_tensor_by_name(requests[0], "MODEL").as_numpy()[0].decode()
        try:
            ready = np.array([pb_utils.is_model_ready(target)])
        except pb_utils.TritonModelException:
            ready = np.array([False])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("READY", ready)])]
"""
READY_CONFIG = """
input [{name: "MODEL", data_type: TYPE_STRING, dims: [1]}]
output [{name: "READY", data_type: TYPE_BOOL, dims: [1]}]
instance_group [{count: 1, kind: KIND_CPU}]
"""
WAITS = """
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pause = threading.Event()
        while not requests[0].is_cancelled():
            pause.wait(0.01)
        return [None for request in requests]
"""
CPU = "instance_group [{count: 1, kind: KIND_CPU}]"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HERE = ("ask", "chain", "ready", "count_here", "half", "whole", "gather")
THERE = ("identity", "stream", "notes", "waits", "misbehave", "asks", "count", "late")


class Connection:
    """The connection of the guide, which notes what it carries."""

    def __init__(self, names: Sequence[str]) -> None:
        self._of_page = class_of_page("connected.py", "Connection")(names)
        self.server: pbhost.Server | None = None
        self.described: list[str] = []
        self.request: InferRequest | None = None

    def _connected(self) -> Any:
        if self.server is None:
            raise unavailable("the other server does not run")
        self._of_page.server = self.server
        return self._of_page

    def serves(self, name: str) -> bool:
        serves: bool = self._of_page.serves(name)
        return serves

    async def describe(self, name: str) -> Sequence[pbhost.RemoteVersion]:
        self.described.append(name)
        described: Sequence[pbhost.RemoteVersion] = await self._connected().describe(name)
        return described

    async def infer(self, request: InferRequest, headers: Mapping[str, str]) -> ResponseStream:
        self.request = request
        async with aclosing(self._connected().infer(request, headers)) as responses:
            async for one in responses:
                yield one

    async def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        found: Sequence[ModelStatistics] = await self._connected().statistics(name, version)
        return found

    async def index(self, ready: bool) -> Sequence[IndexEntry]:
        entries: Sequence[IndexEntry] = await self._connected().index(ready)
        return entries

    async def ready(self) -> bool:
        ready: bool = await self._connected().ready()
        return ready


class Pair:
    """Two servers over one repository, each with some of its models."""

    def __init__(self, repository: RepositoryBuilder, collector: Collector) -> None:
        self._trace_config = [
            "mode=opentelemetry",
            "level=TIMESTAMPS",
            "rate=1",
            f"opentelemetry,url={collector.url}",
            "opentelemetry,bsp_schedule_delay=20",
        ]
        self.loop = asyncio.new_event_loop()
        self.to_there, self.to_here = Connection(THERE), Connection(HERE)
        self.here = self.server(repository, "here", HERE, self.to_there)
        self.there = self.server(repository, "there", THERE, self.to_here)
        self.to_there.server, self.to_here.server = self.there, self.here

    def server(
        self,
        repository: RepositoryBuilder,
        name: str,
        models: Sequence[str],
        connection: Connection,
    ) -> pbhost.Server:
        service = f"opentelemetry,resource=service.name={name}"
        options = pbhost.Options(
            model_repository=[str(repository.path)],
            model_control_mode="explicit",
            load_model=list(models),
            trace_config=[*self._trace_config, service],
            allow_grpc=False,
            allow_http=False,
            allow_metrics=False,
            log_info=False,
            on_demand_timeout_secs=30,
        )
        return pbhost.Server(options, remote_models=connection)

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self.loop.run_until_complete(work)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def pair(module_repository: RepositoryBuilder, collector: Collector) -> Iterator[Pair]:
    module_repository.copy("ask", "identity", "stream", "misbehave")
    module_repository.add("chain", "", CHAIN)
    ask = module_repository.path / "ask"
    module_repository.add(
        "asks",
        (ask / "1" / "model.py").read_text(),
        (ask / "config.pbtxt").read_text() + "instance_group [{count: 2, kind: KIND_CPU}]",
    )
    module_repository.add("notes", NOTES, NOTES_CONFIG)
    module_repository.add("ready", READY, READY_CONFIG)
    module_repository.add("waits", WAITS, CPU)
    for count, ensemble in (("count_here", "half"), ("count", "whole")):
        add_member(module_repository, count, COUNT, inputs="X", outputs="A", decoupled=True)
        steps = [(count, {"X": "I"}, {"A": "t"}), ("late", {"X": "t"}, {"A": "O"})]
        add_ensemble(module_repository, ensemble, "I", "O", steps)
    add_member(module_repository, "late", LATE, inputs="X", outputs="A", count=3)
    add_member(module_repository, "gather", GATHER, inputs="X", outputs="A")
    pair = Pair(module_repository, collector)
    # Ensembles need their step models; other models are not asked for at the start.
    pair.run(pair.there.start())
    pair.run(pair.here.start())
    assert set(pair.to_there.described) == {"identity", "count", "late"}
    assert pair.to_here.described == []
    yield pair
    pair.run(_stop(pair))
    pair.loop.run_until_complete(pair.loop.shutdown_default_executor())
    pair.loop.close()


async def _stop(pair: Pair) -> None:
    await asyncio.gather(pair.here.stop(), pair.there.stop())


def text(value: str) -> np.ndarray[Any, Any]:
    return np.array([value.encode()], dtype=np.object_)


def command(value: str) -> InferRequest:
    content = value.encode()
    data = len(content).to_bytes(4, "little") + content
    return InferRequest("stream", [Tensor("COMMAND", "BYTES", [1], data)], id="7")


async def error_of(work: Awaitable[object]) -> tuple[str, str]:
    with pytest.raises(pbhost.HostError) as caught:
        await work
    return caught.value.code.name, caught.value.message


@pytest.mark.parametrize("count", [4, 4_000_000])
@pytest.mark.parametrize("model", ["identity", "chain", "ask"])
def test_tensors_reach_remote_models_and_come_back(pair: Pair, model: str, count: int) -> None:
    array = np.arange(count, dtype=np.float32)
    inputs = {"INPUT0": array} | ({"MODEL": text("identity")} if model == "ask" else {})
    result = pair.run(pair.here.infer(model, inputs, request_id="9"))
    np.testing.assert_array_equal(result["OUTPUT0"], array)
    assert (result.model_name, result.model_version, result.id) == (model, 1, "9")


def test_models_that_call_each_other_are_learned_when_they_are_called(pair: Pair) -> None:
    array = np.arange(5, dtype=np.float32)
    inputs = {"MODEL": text("chain"), "INPUT0": array}
    for server in (pair.here, pair.there):
        result = pair.run(server.infer("ask", inputs))
        np.testing.assert_array_equal(result["OUTPUT0"], array)
    assert pair.to_here.described == ["ask"]


@pytest.mark.parametrize("path", ["asks>ask>identity", "asks>chain", "asks>asks>ask>chain"])
def test_a_request_that_waits_for_itself_is_found_through_other_servers(
    pair: Pair, path: str
) -> None:
    """The only instance of `ask` waits for `asks`, which waits for `ask` or succeeds."""
    array = np.arange(5, dtype=np.float32)
    asked = asyncio.wait_for(
        pair.here.infer("ask", {"MODEL": text(path), "INPUT0": array}), DEADLINE
    )
    if path == "asks>chain":
        np.testing.assert_array_equal(pair.run(asked)["OUTPUT0"], array)
        return
    assert pair.run(error_of(asked)) == (
        "INTERNAL",
        (
            "Model asks - Error when running inference: the request waits for itself: every"
            " instance of model 'ask' is busy with a request that waits for this one. Raise the"
            " instance_group count of 'ask', or do not call 'asks' from a model that it calls"
        ),
    )


def test_everything_about_a_request_is_passed_on(pair: Pair) -> None:
    async def main() -> InferResponse:
        return await pair.here.infer_request(
            InferRequest(
                "notes",
                [],
                id="mine",
                parameters={"a": 1, "b": "text", "c": True, "d": 0.5},
                correlation_id="sequence",
                flags=3,
                priority=2,
                timeout_us=60_000_000,
                requested_outputs=["SEEN"],
            )
        )

    response = pair.run(main())
    assert pair.to_there.request is not None and pair.to_there.request.priority == 2
    data = bytes(response.outputs[0].data)
    assert json.loads(data[4:]) == {
        "id": "mine",
        "parameters": {"a": 1, "b": "text", "c": True, "d": 0.5},
        "correlation_id": "sequence",
        "flags": 3,
        "timeout": 60_000_000,
        "outputs": ["SEEN"],
    }
    assert response.parameters["by"] == "notes"


def test_errors_are_those_of_the_other_server(pair: Pair) -> None:
    async def errors(server: pbhost.Server) -> list[tuple[str, str]]:
        return [
            await error_of(server.infer("identity", {"INPUT0": np.zeros(2, np.int8)})),
            await error_of(server.infer("identity", {})),
            await error_of(server.infer("identity", {"INPUT0": np.zeros(1, "f")}, version=7)),
            await error_of(server.infer("misbehave", {"COMMAND": text("raise")})),
        ]

    assert pair.run(errors(pair.here)) == pair.run(errors(pair.there))
    asks = pair.here.infer("ask", {"MODEL": text("missing"), "INPUT0": np.zeros(1, "f")})
    assert "unknown model: 'missing' is not found" in pair.run(error_of(asks))[1]


def test_decoupled_responses_come_in_order_with_their_end(pair: Pair) -> None:
    async def main() -> list[tuple[int | None, bool]]:
        request = command("thread:many=1000 final")
        found: list[tuple[int | None, bool]] = []
        async for response, final in (
            await pair.here.core.infer_when_loaded(request)
        ).iterate_with_final():
            number = None
            if response is not None:
                assert response.id == "7"
                number = int.from_bytes(response.outputs[0].data, "little")
            found.append((number, final))
        return found

    assert pair.run(main()) == [*((number, False) for number in range(1000)), (None, True)]


@pytest.mark.parametrize("model", ["count", "half", "whole"])
def test_a_model_reads_responses_of_remote_models_in_order(
    pair: Pair, module_repository: RepositoryBuilder, model: str
) -> None:
    """In the ensembles, three remote instances take a response each, the first one longest."""
    (module_repository.path / "late-5").unlink(missing_ok=True)
    inputs = {"X": np.array([60], np.float32)}
    result = pair.run(pair.here.infer("gather", inputs, parameters={"model": model}))
    np.testing.assert_array_equal(result["A"], np.arange(60))


def test_a_slow_caller_slows_down_the_remote_model(pair: Pair) -> None:
    async def main() -> None:
        request = command("thread:many=5000 last")
        call = await pair.here.core.infer_when_loaded(request)
        responses = call.iterate_with_final()
        await anext(responses)
        other = pair.there.core
        await eventually(lambda: len(call.undelivered_responses()) >= 30, "responses to wait")
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(call.undelivered_responses()) <= 40
        await responses.aclose()
        await eventually(
            lambda: pair.there.queue_state("stream").in_flight == 0, "the call to be cancelled"
        )
        assert other.list_ready_versions()

    pair.run(main())


@pytest.mark.parametrize("how", ["the caller goes", "the request is withdrawn"])
def test_a_cancelled_request_is_cancelled_at_the_other_server(pair: Pair, how: str) -> None:
    async def main() -> None:
        call = await pair.here.core.infer_when_loaded(InferRequest("waits", []))
        await eventually(
            lambda: pair.there.queue_state("waits").in_flight == 1, "the request to arrive"
        )
        if how == "the caller goes":
            call.cancel()
        else:
            call.request_cancellation(unavailable("over"))
        await eventually(
            lambda: pair.there.queue_state("waits").in_flight == 0, "the request to end"
        )
        assert pair.here.queue_state().in_flight == 0

    pair.run(main())


def test_metadata_and_readiness_are_those_of_the_other_server(pair: Pair) -> None:
    async def ready() -> tuple[bool, bool]:
        inputs = {"MODEL": text("identity")}
        by_model = (await pair.here.infer("ready", inputs))["READY"]
        return await pair.here.core.health.model_ready("identity", ""), bool(by_model[0])

    async def main() -> None:
        core = pair.here.core
        assert await ready() == (True, True)
        await core.refresh_remote("identity")
        assert core.model_metadata("identity", "") == pair.there.core.model_metadata("identity", "")
        changed = '{"parameters": {"color": {"string_value": "blue"}}, "backend": "python"}'
        await pair.there.load_model("identity", {"config": _with_tensors(changed)})
        await core.refresh_remote("identity")
        assert core.model_config("identity", "").parameters["color"].string_value == "blue"
        with pytest.raises(pbhost.HostError, match="belongs to another server"):
            await core.control.load_model("identity", {})
        with pytest.raises(pbhost.HostError, match="belongs to another server"):
            await core.control.unload_model("identity", False)
        await pair.there.unload_model("identity")
        assert await ready() == (False, False)
        missing = "Request for unknown model: 'identity' has no available versions"
        array = {"INPUT0": np.zeros(1, "f")}
        assert await error_of(pair.here.infer("identity", array)) == ("NOT_FOUND", missing)
        asks = pair.here.infer("ask", {"MODEL": text("identity"), **array})
        assert (await error_of(asks))[1].endswith(missing)
        assert (await error_of(pair.here.infer("chain", array)))[1] == (
            f"in ensemble 'chain', {missing}"
        )
        await pair.there.load_model("identity")
        await pair.here.refresh_remote_model("identity")
        for model in ("identity", "chain"):
            assert (await pair.here.infer(model, array))["OUTPUT0"] == [0]
        assert await ready() == (True, True)

    pair.run(main())


def test_an_ensemble_goes_and_comes_back_with_a_model_of_another_server(
    pair: Pair, module_repository: RepositoryBuilder, collector: Collector
) -> None:
    array = {"INPUT0": np.zeros(1, "f")}
    late = pair.server(module_repository, "late", ("chain",), pair.to_there)

    async def state(server: pbhost.Server) -> tuple[list[str], bool]:
        entries = await server.own_models.index(False)
        states = [one.state for one in entries if one.name == "chain"]
        return states, await server.core.health.own_ready()

    async def main() -> None:
        await pair.there.unload_model("identity")
        assert await pair.here.refresh_remote_model("identity")
        await eventually(
            lambda: ("chain", 1) not in pair.here.own_models.ready_versions(),
            "the ensemble to be unloaded",
        )
        assert await state(pair.here) == (["UNAVAILABLE"], True)
        await late.start()
        try:
            assert late.waiting_ensembles() == {"chain": ["identity"]}
            assert not await late.refresh_remote_model("identity")
            assert await late.core.health.own_ready()
            await pair.there.load_model("identity")
            for server in (pair.here, late):
                assert await server.refresh_remote_model("identity")
                assert await state(server) == (["READY"], True)
                assert (await server.infer("chain", array))["OUTPUT0"] == [0]
            assert not late.waiting_ensembles()
        finally:
            await late.stop()

    pair.run(main())


def _with_tensors(config: str) -> str:
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    return json.dumps(
        json.loads(config)
        | {"input": [{"name": "INPUT0", **tensor}], "output": [{"name": "OUTPUT0", **tensor}]}
    )


def test_index_and_statistics_have_the_models_of_both(pair: Pair) -> None:
    async def main() -> None:
        await pair.here.infer("notes", {})
        entries = await pair.here.core.repository_index(True)
        assert [entry.name for entry in entries] == sorted(HERE + THERE)
        (one,) = await pair.here.core.collect_statistics("notes", "")
        assert one == pair.there.core.statistics("notes", "")[0] and one.inference_count > 0
        everything = await pair.here.core.collect_statistics("", "")
        assert sorted(one.name for one in everything) == sorted(HERE + THERE)
        families = await pair.here.collect_metrics()
        (successes,) = (f for f in families if f.name == "nv_inference_request_success")
        assert {dict(sample.labels)["model"] for sample in successes.samples} <= set(HERE)

    pair.run(main())


def test_a_server_that_is_gone_makes_its_models_unavailable(pair: Pair) -> None:
    async def main() -> None:
        array = {"INPUT0": np.zeros(1, "f")}
        pair.to_there.server = None
        assert await error_of(pair.here.infer("identity", array)) == (
            "UNAVAILABLE",
            "the other server does not run",
        )
        with pytest.raises(pbhost.HostError, match="does not run"):
            await pair.here.core.health.model_ready("identity", "")
        pair.to_there.server = pair.there
        assert (await pair.here.infer("identity", array))["OUTPUT0"] == [0]

    pair.run(main())


def test_a_trace_goes_on_at_the_other_server(pair: Pair, collector: Collector) -> None:
    async def main() -> None:
        tracer = pair.here.core.request_tracer
        assert tracer is not None
        trace = tracer.start_trace("chain", {"traceparent": f"00-{TRACE}-{SPAN}-01"}.get)
        assert trace is not None
        array = Tensor("INPUT0", "FP32", [1], bytes(4))
        await pair.here.infer_request(InferRequest("chain", [array], trace=trace))
        trace.finish_response()

    pair.run(main())
    found = collector.wait_for(lambda span: span.trace == TRACE, 6)
    parents = {span.id: span for span in found}
    (compute,) = (span for span in found if span.name == "compute" and _server(span) == "there")
    path = [compute]
    while path[-1].parent in parents:
        path.append(parents[path[-1].parent])
    assert [(_server(span), span.name) for span in path] == [
        ("there", "compute"),
        ("there", "identity"),
        ("there", "InferRequest"),
        ("here", "identity"),
        ("here", "chain"),
        ("here", "InferRequest"),
    ]
    assert path[-1].parent == SPAN


def _server(span: Span) -> object:
    return span.resource["service.name"]


def test_responses_without_an_end_are_an_error(pair: Pair) -> None:
    class Ends(Connection):
        async def infer(
            self, request: InferRequest, headers: Mapping[str, str]
        ) -> AsyncGenerator[tuple[InferResponse | None, bool], None]:
            for _ in ():
                yield None, False

    async def main() -> None:
        before = pair.to_there.infer
        pair.to_there.infer = Ends(THERE).infer  # type: ignore[method-assign]  # breaks off
        try:
            assert await error_of(pair.here.infer("identity", {"INPUT0": np.zeros(1, "f")})) == (
                "INTERNAL",
                "the server of model 'identity' ended without a response",
            )
        finally:
            pair.to_there.infer = before  # type: ignore[method-assign]

    pair.run(main())


class Slow(Connection):
    """Has one model, which answers once `answers` is set."""

    def __init__(self) -> None:
        super().__init__(["slow"])
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def describe(self, name: str) -> Sequence[pbhost.RemoteVersion]:
        config = new_config()
        config.name = name
        return [pbhost.RemoteVersion(1, config)]

    async def infer(self, request: InferRequest, headers: Mapping[str, str]) -> ResponseStream:
        self.asked.set()
        await self.answers.wait()
        yield InferResponse("slow", 1, request.id), True


@pytest.mark.parametrize("in_time", [True, False])
def test_a_server_that_stops_lets_requests_to_remote_models_end(
    repository: RepositoryBuilder, in_time: bool
) -> None:
    slow = Slow()
    alone = options(
        repository, allow_grpc=False, allow_metrics=False, exit_timeout_secs=30 if in_time else 0
    )

    async def main() -> None:
        server = await pbhost.Server(alone, remote_models=slow).start()
        answer = asyncio.ensure_future(server.infer("slow", {}))
        await asyncio.wait_for(slow.asked.wait(), DEADLINE)
        stop = asyncio.ensure_future(server.stop())
        if in_time:
            await eventually(lambda: _refuses(server, "slow"), "new requests to be refused")
            assert not answer.done()
            slow.answers.set()
            assert await stop
            assert (await answer).model_name == "slow"
        else:
            assert not await stop
            assert await error_of(answer) == ("UNAVAILABLE", "the server stops")

    asyncio.run(main())


def _refuses(server: pbhost.Server, model: str) -> bool:
    try:
        server.core.infer(InferRequest(model, [])).cancel()
    except pbhost.HostError:
        return True
    return False


def test_remote_models_do_not_go_with_namespaces(repository: RepositoryBuilder) -> None:
    with pytest.raises(pbhost.HostError, match="do not work with model_namespacing") as caught:
        pbhost.Server(options(repository, model_namespacing=True), remote_models=Slow())
    assert caught.value.code is pbhost.ErrorCode.INVALID_ARG
