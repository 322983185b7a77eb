"""The metrics port of a real host, and custom metrics of models."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any
from urllib.request import urlopen

import numpy as np
import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from prometheus_client.parser import text_string_to_metric_families as read_text
from tritonclient.utils import InferenceServerException

import pbhost
from tests.clients import Client, InferStream, infer_error, run_command, run_script, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.waiting import UNTIL_SOURCE


def scrape(host: RunningHost, accept: str = "") -> str:
    """The text of one scrape."""
    connection = http.client.HTTPConnection(host.metrics_url, timeout=DEADLINE)
    with closing(connection):
        connection.request("GET", "/metrics", headers={"accept": accept} if accept else {})
        response = connection.getresponse()
        text = response.read().decode()
    assert response.status == 200, text
    return text


def value(host: RunningHost, series: str) -> float | None:
    """The value of `name{labels}`, None if it is not in the scrape."""
    found = re.search(rf"^{re.escape(series)} (\S+)$", scrape(host), re.MULTILINE)
    return None if found is None else float(found.group(1))


SCRAPE = """
def scrape():
    from urllib.request import urlopen
    return urlopen("http://{url}/metrics", timeout=60).read().decode()

def error(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except pb_utils.TritonModelException as raised:
        return str(raised)
    return "no error"

F = pb_utils.MetricFamily
"""


class Scripted:
    """Runs scripts in a model that can scrape its own host."""

    def __init__(self, host: RunningHost, client: Client) -> None:
        self.host = host
        self._client = client
        self._head = SCRAPE.format(url=host.metrics_url)

    def run(self, source: str, model: str = "script") -> Any:
        return run_script(self._client, self._head + dedent(source), model)


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("script", "identity", "misbehave", "stream")
    code = (module_repository.path / "script" / "1" / "model.py").read_text()
    config = (module_repository.path / "script" / "config.pbtxt").read_text()
    module_repository.add("other", code, config)
    module_repository.add("mortal", code, config)
    module_repository.add("tagged", code, config + 'metric_tags { key: "team" value: "vision" }')
    return module_serve(module_repository).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


@pytest.fixture
def scripted(host: RunningHost, client: Client) -> Scripted:
    return Scripted(host, client)


# Custom metrics of models


def test_a_scrape_by_the_model_has_its_latest_changes(
    scripted: Scripted,
) -> None:
    first, second = scripted.run(
        """
        self.at_once = F("at_once", "seen by the model", F.COUNTER)
        metric = self.at_once.Metric(labels={"z": "1", "a": "2"})
        metric.increment(1)
        first = scrape()
        for _ in range(1000):
            metric.increment(0.5)
        return [first, scrape()]
        """
    )
    assert "# HELP at_once seen by the model\n# TYPE at_once counter\n" in first
    assert 'at_once{a="2",z="1"} 1\n' in first
    assert 'at_once{a="2",z="1"} 501\n' in second


def test_the_next_scrape_has_a_burst_of_changes_larger_than_any_queue(
    scripted: Scripted,
) -> None:
    text = scripted.run(
        """
        self.burst = F("burst", "", F.COUNTER)
        metric = self.burst.Metric()
        for _ in range(50_000):
            metric.increment(1)
        return scrape()
        """
    )
    assert "\nburst 50000\n" in text


def test_the_next_scrape_has_changes_of_other_threads(scripted: Scripted) -> None:
    text = scripted.run(
        """
        import threading
        self.threads = F("threads_family", "", F.COUNTER)
        metric = self.threads.Metric()
        threads = [
            threading.Thread(target=lambda: [metric.increment(1) for _ in range(500)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return scrape()
        """
    )
    assert "\nthreads_family 2000\n" in text


def test_every_kind_is_exported_in_tritons_format(scripted: Scripted) -> None:
    text, read = scripted.run(
        """
        self.kinds = [
            F("kind_counter", "c", F.COUNTER),
            F("kind_gauge", "g", F.GAUGE),
            F("kind_histogram", "h", F.HISTOGRAM),
        ]
        counter, gauge = (family.Metric({"k": "v"}) for family in self.kinds[:2])
        histogram = self.kinds[2].Metric({"k": "v"}, buckets=[0.1, 1.0, 2.5, 5.0, 10.0])
        none = self.kinds[2].Metric({"k": "none"}, buckets=[])
        counter.increment(2.5)
        gauge.set(10)
        gauge.increment(-12.5)
        for observed in (0.05, 1.5, 6.0):
            histogram.observe(observed)
        none.observe(3)
        return [scrape(), [counter.value(), gauge.value()]]
        """
    )
    assert read == [2.5, -2.5]
    for block in (
        '# HELP kind_counter c\n# TYPE kind_counter counter\nkind_counter{k="v"} 2.5\n',
        '# TYPE kind_gauge gauge\nkind_gauge{k="v"} -2.5\n',
        "# TYPE kind_histogram histogram\n",
        'kind_histogram_count{k="v"} 3\nkind_histogram_sum{k="v"} 7.55\n',
        'kind_histogram_bucket{k="v",le="0.1"} 1\n',
        'kind_histogram_bucket{k="v",le="1"} 1\n',
        'kind_histogram_bucket{k="v",le="2.5"} 2\n',
        'kind_histogram_bucket{k="v",le="5"} 2\n',
        'kind_histogram_bucket{k="v",le="10"} 3\n',
        'kind_histogram_bucket{k="v",le="+Inf"} 3\n',
        'kind_histogram_bucket{k="none",le="+Inf"} 1\n',
    ):
        assert block in text


def test_equal_families_and_metrics_share_their_value(scripted: Scripted) -> None:
    before, values, after = scripted.run(
        """
        name = "test_dup_metric_family"
        one = self.one = F(name, "dup description", F.COUNTER)
        two = self.two = F(name, "other description", F.COUNTER)
        first = one.Metric(labels={"custom_metric_key": "label1"})
        same = two.Metric(labels={"custom_metric_key": "label1"})
        second = two.Metric(labels={"custom_metric_key": "label2"})
        before = scrape()
        first.increment(1)
        same.increment(2)
        return [before, [first.value(), same.value(), second.value()], scrape()]
        """
    )
    assert before.count("# HELP test_dup_metric_family dup description") == 1
    assert before.count("# TYPE test_dup_metric_family counter") == 1
    assert 'test_dup_metric_family{custom_metric_key="label2"} 0' in before
    assert values == [3, 3, 0]
    assert 'test_dup_metric_family{custom_metric_key="label1"} 3' in after


def test_deleting_one_of_two_families_keeps_the_series_of_the_other(scripted: Scripted) -> None:
    series = 'held_twice{k="v"}'
    scripted.run(
        """
        self.held = [F("held_twice", "", F.COUNTER) for _ in range(2)]
        for family in self.held:
            family.Metric({"k": "v"}).increment(1)
            family.Metric({"k": str(id(family))}).increment(1)
        """
    )
    assert scrape(scripted.host).count("held_twice{") == 3
    scripted.run("del self.held[0]")
    wait_until(lambda: scrape(scripted.host).count("held_twice{") == 2, "the dropped label set")
    assert value(scripted.host, series) == 2
    scripted.run("del self.held[0]")
    wait_until(lambda: value(scripted.host, series) is None, "the other one")
    assert "held_twice" not in scrape(scripted.host)


def test_a_metric_outlives_its_object_and_is_removed_with_its_family(scripted: Scripted) -> None:
    kept, deleted = scripted.run(
        """
        family = F("lifetime", "", F.GAUGE)
        metric = family.Metric()
        metric.set(5)
        del metric
        kept = "lifetime 5" in scrape()
        metric = family.Metric()
        del family
        calls = [lambda: metric.set(1), lambda: metric.increment(1), metric.value]
        return [kept, [error(call) for call in calls]]
        """
    )
    assert kept
    text = (
        " metric value: Invalid metric operation as the corresponding 'MetricFamily' has been"
        " deleted. The 'MetricFamily' object should be deleted AFTER its corresponding 'Metric'"
        " objects have been deleted."
    )
    assert deleted == [f"Failed to {verb}{text}" for verb in ("set", "increment", "get")]
    wait_until(lambda: value(scripted.host, "lifetime") is None, "the metric")


def test_a_label_set_that_is_created_again_starts_at_zero(scripted: Scripted) -> None:
    values = scripted.run(
        """
        values = []
        for _ in range(50):
            family = F("again", "", F.COUNTER)
            metric = family.Metric({"k": "v"})
            values.append(metric.value())
            metric.increment(7)
            del family, metric
        return values
        """
    )
    assert values == [0] * 50


def test_errors_of_the_server_are_raised_in_the_model(scripted: Scripted) -> None:
    counter, family, sorted_, name, label, server = scripted.run(
        """
        self.refused = F("refused", "", F.COUNTER)
        histogram = self.histogram = F("refused_histogram", "", F.HISTOGRAM)
        return [
            error(self.refused.Metric().increment, -1),
            error(F, "refused", "", F.GAUGE),
            error(histogram.Metric, buckets=[2.0, 1.0]),
            error(F, "not a name", "", F.GAUGE),
            error(self.refused.Metric, {"not a label": "x"}),
            error(F, "nv_inference_count", "", F.COUNTER),
        ]
        """
    )
    said = "Failed to process the request for model 'script_0', message: "
    assert counter == (
        f"Failed to increment metric value: {said}TRITONSERVER_METRIC_KIND_COUNTER can only be"
        " incremented monotonically by non-negative values."
    )
    assert family == (
        f"Error when creating MetricFamily: {said}Family name already exists with different type"
    )
    assert sorted_ == (
        f"Error when creating Metric: {said}Bucket Boundaries must be strictly sorted"
    )
    assert name.startswith(f"Error when creating MetricFamily: {said}Invalid metric name")
    assert label.startswith(f"Error when creating Metric: {said}Invalid label name")
    assert "is reserved for a metric of the server" in server


def test_instances_share_a_label_set_and_a_killed_one_releases_it(
    scripted: Scripted,
) -> None:
    host = scripted.host
    make = """
        self.family = F("shared_by_models", "", F.COUNTER)
        self.shared = self.family.Metric({"who": "all"})
        self.own = self.family.Metric({"who": "WHO"})
        self.shared.increment(2)
        return self.shared.value()
    """
    assert scripted.run(make.replace("WHO", "mortal"), "mortal") == 2
    assert scripted.run(make.replace("WHO", "other"), "other") == 4
    (stub,) = host.stubs("mortal_0")
    os.kill(stub.pid, signal.SIGKILL)
    wait_until(lambda: value(host, 'shared_by_models{who="mortal"}') is None, "its references")
    assert value(host, 'shared_by_models{who="all"}') == 4
    scripted.run("del self.own, self.shared, self.family", "other")
    wait_until(lambda: "shared_by_models{" not in scrape(host), "the last references")
    restarts = 'pbhost_stub_restarts_total{instance="mortal_0",model="mortal",version="1"}'
    wait_until(lambda: value(host, restarts) == 1, "the restart")


# Metrics of the server


def test_requests_are_counted(host: RunningHost, client: Client) -> None:
    labels = '{model="identity",version="1"}'
    names = ("request_success", "count", "exec_count", "request_duration_us")
    before = [value(host, f"nv_inference_{name}{labels}") for name in names]
    client.infer("identity", [tensor("INPUT0", np.zeros(3, np.float32))])
    after = [value(host, f"nv_inference_{name}{labels}") for name in names]
    grown = [new - old for new, old in zip(after, before, strict=True) if new and old is not None]
    assert grown[:3] == [1, 1, 1] and grown[3] > 0
    assert value(host, f"nv_inference_pending_request_count{labels}") == 0
    load = value(host, f"nv_model_load_duration_secs{labels}")
    assert load is not None and load > 0


def failures(host: RunningHost, model: str, reason: str) -> float:
    found = value(
        host, f'nv_inference_request_failure{{model="{model}",reason="{reason}",version="1"}}'
    )
    assert found is not None
    return found


def test_instances_and_their_memory_are_measured(host: RunningHost, client: Client) -> None:
    labels = '{instance="identity_0",model="identity",version="1"}'
    before = value(host, f"pbhost_instance_busy_us_total{labels}")
    client.infer("identity", [tensor("INPUT0", np.zeros(1 << 20, np.float32))])
    after = value(host, f"pbhost_instance_busy_us_total{labels}")
    assert before is not None and after is not None and after > before
    assert value(host, f"pbhost_stub_up{labels}") == 1
    limit = value(host, "pbhost_arena_limit_bytes")
    for owner in ("host", "stubs"):
        used = value(host, f'pbhost_arena_used_bytes{{owner="{owner}"}}')
        assert used is not None and limit is not None and 0 <= used < limit


def test_an_error_of_a_model_counts_as_backend_failure(host: RunningHost, client: Client) -> None:
    before = failures(host, "script", "BACKEND")
    infer_error(run_script, client, "raise ValueError('no')")
    assert failures(host, "script", "BACKEND") == before + 1
    assert [failures(host, "script", r) for r in ("REJECTED", "CANCELED", "OTHER")] == [0, 0, 0]


def failed_once(host: RunningHost, model: str) -> bool:
    return failures(host, model, "BACKEND") == 1


def test_error_responses_count_as_failures_of_any_kind_of_model(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    model = """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                answer = pb_utils.InferenceResponse(error=pb_utils.TritonError("no"))
                if not {decoupled}:
                    return [answer for _ in requests]
                for request in requests:
                    sender = request.get_response_sender()
                    sender.send(pb_utils.InferenceResponse([]))
                    sender.send(answer, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """
    config = """
        backend: "python"
        input [ {{ name: "COMMAND" data_type: TYPE_STRING dims: [ 1 ] }} ]
        output [ {{ name: "ANSWER" data_type: TYPE_STRING dims: [ 1 ] }} ]
        model_transaction_policy {{ decoupled: {decoupled} }}
        """
    for decoupled in (False, True):
        words = {"decoupled": str(decoupled).lower()}
        repository.add(
            f"fails_{words['decoupled']}",
            model.replace("{decoupled}", str(decoupled)),
            config.format(**words),
        )
    host = serve(repository).wait_started()
    for name in ("fails_false", "fails_true"):
        with InferStream(host) as stream:
            stream.send("", name)
            if name == "fails_true":
                stream.next()
            with pytest.raises(InferenceServerException, match="no"):
                stream.next()
        wait_until(partial(failed_once, host, name), "the failure")
        assert value(host, f'nv_inference_request_success{{model="{name}",version="1"}}') == 0


def test_a_request_that_is_not_valid_is_not_counted(host: RunningHost, client: Client) -> None:
    before = scrape(host).count("nv_"), failures(host, "identity", "OTHER")
    infer_error(client.infer, "identity", [tensor("WRONG", np.zeros(3, np.float32))])
    assert (scrape(host).count("nv_"), failures(host, "identity", "OTHER")) == before


def test_a_cancelled_call_counts_as_cancelled(host: RunningHost) -> None:
    with InferStream(host) as stream:
        stream.send("thread:respond cancelled last")
        stream.next()
    wait_until(lambda: failures(host, "stream", "CANCELED") == 1, "the cancellation")
    assert failures(host, "stream", "BACKEND") == 0


WAIT_FOR_FILE = """
import os
open({path!r} + ".reached", "w").close()
until(lambda: os.path.exists({path!r}), "the gate to be opened")
"""


@contextmanager
def busy(host: RunningHost, model: str, gate: Path) -> Iterator[None]:
    """A request to that model runs until the block ends."""
    with ThreadPoolExecutor(1) as pool, host.client() as client:
        running = pool.submit(run_script, client, WAIT_FOR_FILE.format(path=str(gate)), model)
        try:
            wait_until(Path(f"{gate}.reached").exists, "the request to run")
            yield
        finally:
            gate.touch()
        running.result(DEADLINE)


def test_requests_that_wait_for_execution_are_pending(host: RunningHost, tmp_path: Path) -> None:
    pending = 'nv_inference_pending_request_count{model="other",version="1"}'
    with ThreadPoolExecutor(2) as pool, host.client() as client:
        with busy(host, "other", tmp_path / "gate"):
            waiting = [pool.submit(run_script, client, "pass", "other") for _ in range(2)]
            wait_until(lambda: value(host, pending) == 2, "two pending requests")
        for one in waiting:
            one.result(DEADLINE)
    assert value(host, pending) == 0


def test_metric_tags_become_labels_of_the_models_series(host: RunningHost) -> None:
    assert (
        value(host, 'nv_inference_request_success{_team="vision",model="tagged",version="1"}') == 0
    )


def test_the_machine_is_measured(host: RunningHost) -> None:
    busy = value(host, "nv_cpu_utilization")
    assert busy is not None and 0 <= busy <= 1
    total, used = value(host, "nv_cpu_memory_total_bytes"), value(host, "nv_cpu_memory_used_bytes")
    assert total and used and 0 < used < total
    assert value(host, "nv_pinned_memory_pool_total_bytes") == 268435456


def test_other_libraries_can_read_a_whole_scrape(host: RunningHost) -> None:
    def series(families: Any) -> set[str]:
        """Names and labels. The parser of the text format gives counters another suffix."""
        return {
            f"{sample.name.removesuffix('_total')} {sorted(sample.labels.items())}".replace(
                ".0'",
                "'",  # OpenMetrics writes bounds of buckets as floats
            )
            for family in families
            for sample in family.samples
        }

    text = series(read_text(scrape(host)))
    written = scrape(host, accept="application/openmetrics-text; version=1.0.0")
    assert series(read_open(written)) == text


# With other hosts


def test_a_scrape_first_reads_pending_messages_of_stubs(
    repository: RepositoryBuilder, tmp_path: Path
) -> None:
    repository.copy("script")
    started, go, done = (tmp_path / name for name in ("started", "go", "done"))
    source = f"""
        import pathlib
        self.family = pb_utils.MetricFamily("said", "", pb_utils.MetricFamily.COUNTER)
        metric = self.family.Metric()
        pathlib.Path({str(started)!r}).touch()
        until(pathlib.Path({str(go)!r}).exists, "the word to continue")
        metric.increment(1)
        pathlib.Path({str(done)!r}).touch()
    """
    options = pbhost.Options(
        model_repository=[str(repository.path)],
        allow_grpc=False,
        allow_http=False,
        metrics_port=0,
        metrics_address="127.0.0.1",
        log_info=False,
    )

    async def main() -> list[float]:
        async with pbhost.Server(options) as server:
            inputs = {"COMMAND": np.array([dedent(source).encode()], dtype=np.object_)}
            running = asyncio.create_task(server.infer("script", inputs))
            await asyncio.to_thread(wait_until, started.exists, "the start")
            go.touch()
            wait_until(done.exists, "the change")  # the event loop reads nothing meanwhile
            assert server._metrics_collector is not None
            families = {family.name: family for family in server._metrics_collector.collect()}
            await running
            return [sample.value for sample in families["said"].samples]

    assert asyncio.run(main()) == [1]


BATCHING = """
backend: "python"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
GATED = f"""
import os

{UNTIL_SOURCE}
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_info("gated runs")
        until(lambda: not os.path.exists(os.environ["GATE"]), "the gate to be opened")
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())])
            for r in requests
        ]
"""


def one() -> list[Any]:
    return [tensor("X", np.zeros((1, 1), np.float32))]


COUNTING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily("starts", "", pb_utils.MetricFamily.COUNTER)
        self.family.Metric({"model": args["model_name"]}).increment(1)
        self.family.Metric({"instance": args["model_instance_name"]}).increment(1)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def test_a_label_set_shared_by_instances_outlives_one_of_them(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("counting", COUNTING, BATCHING + "instance_group [ { count: 2 } ]")
    flags = ("--model-control-mode=explicit", "--load-model=counting")
    host = serve(repository, *flags).wait_started()
    assert value(host, 'starts{model="counting"}') == 2
    (stub,) = host.stubs("counting_0_0")
    os.kill(stub.pid, signal.SIGKILL)
    wait_until(lambda: value(host, 'starts{model="counting"}') == 3, "the replacing instance")
    first = 'starts{instance="counting_0_0"}'
    wait_until(lambda: value(host, first) == 1, "its own label set, which started at zero")
    assert value(host, 'starts{instance="counting_0_1"}') == 1
    with host.client() as client:
        client.unload_model("counting")
    wait_until(lambda: "starts" not in scrape(host), "the end of both")


def test_a_request_that_times_out_in_the_queue_counts_as_rejected(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    policy = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 300000 } }"
    repository.add("gated", GATED, BATCHING + policy)
    gate = tmp_path / "gate"
    gate.touch()
    host = serve(repository, env={"GATE": str(gate)}).wait_started()
    with ThreadPoolExecutor(1) as pool, host.client() as client:
        running = pool.submit(client.infer, "gated", one())
        host.wait_for("gated runs")
        assert "Request timeout expired" in infer_error(client.infer, "gated", one())[1]
        gate.unlink()
        running.result(DEADLINE)
    assert failures(host, "gated", "REJECTED") == 1


def test_a_killed_stub_counts_as_backend_failure(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave")
    host = serve(repository).wait_started()
    with host.client() as client:
        infer_error(run_command, client, "kill")
    assert failures(host, "misbehave", "BACKEND") == 1


def test_batches_are_counted_by_their_size(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.add("batching", GATED, BATCHING + "dynamic_batching { }")
    host = serve(repository, env={"GATE": str(tmp_path / "none")}).wait_started()
    with host.client() as client:
        client.infer("batching", [tensor("X", np.zeros((3, 1), np.float32))])
    labels = 'model="batching",version="1"'
    assert value(host, f"nv_inference_count{{{labels}}}") == 3
    assert value(host, f"nv_inference_exec_count{{{labels}}}") == 1
    buckets = [value(host, f'pbhost_batch_size_bucket{{{labels},le="{b}"}}') for b in "124"]
    assert buckets == [0, 0, 1]
    reasons = ("size", "misfit", "delay", "no_delay")
    series = 'pbhost_batches_closed_total{{model="batching",reason="{}",version="1"}}'
    closed = [value(host, series.format(why)) for why in reasons]
    assert closed == [0, 0, 0, 1]


def test_a_reload_continues_the_series_and_an_unload_removes_them(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    flags = ("--model-control-mode=explicit", "--load-model=identity")
    host = serve(repository, *flags).wait_started()
    success = 'nv_inference_request_success{model="identity",version="1"}'
    array = np.zeros(3, np.float32)
    with host.client() as client:
        client.infer("identity", [tensor("INPUT0", array)])
        (repository.path / "identity" / "1" / "model.py").touch()
        client.load_model("identity")
        client.infer("identity", [tensor("INPUT0", array)])
        assert value(host, success) == 2
        host.wait_for("successfully unloaded 'identity' version 1")
        assert value(host, success) == 2
        client.unload_model("identity")
        wait_until(lambda: value(host, success) is None, "the end of the series")
        assert "nv_inference" not in scrape(host)
        client.load_model("identity")
        assert value(host, success) == 0


def test_requests_that_finish_after_a_reload_are_counted(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("script")
    flags = ("--model-control-mode=explicit", "--load-model=script")
    host = serve(repository, *flags).wait_started()
    success = 'nv_inference_request_success{model="script",version="1"}'
    with host.client() as client:
        with busy(host, "script", tmp_path / "gate"):
            client.unload_model("script")
            client.load_model("script")
            assert value(host, success) == 0
        host.wait_for("successfully unloaded 'script' version 1")
        assert value(host, success) == 1


def test_flags_select_the_exported_metrics(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity", "stream")
    host = serve(
        repository,
        "--allow-cpu-metrics=false",
        "--metrics-config=counter_latencies=false",
        "--metrics-config=summary_latencies=true",
        "--metrics-config=summary_quantiles=0.5:0.05,nonsense,0.9:0.01",
        "--metrics-config=histogram_latencies=true",
    ).wait_started()
    with host.client() as client:
        client.infer("identity", [tensor("INPUT0", np.zeros(3, np.float32))])
    with InferStream(host) as stream:
        stream.send("respond respond last")
        assert stream.read_numbers() == [0, 1, 2]
    text = scrape(host)
    labels = 'model="identity",version="1"'
    for absent in ("nv_cpu", "duration_us"):
        assert absent not in text
    assert value(host, f"nv_inference_request_success{{{labels}}}") == 1
    assert value(host, f"nv_inference_request_summary_us_count{{{labels}}}") == 1
    quantiles = re.findall(rf'request_summary_us\{{{labels},quantile="(.+)"\}} [0-9]+\n', text)
    assert quantiles == ["0.5", "0.9"]
    first = "nv_inference_first_response_histogram_ms"
    for model in ("identity", "stream"):
        assert value(host, f'{first}_count{{model="{model}",version="1"}}') == 1
        bounds = re.findall(rf'{first}_bucket\{{model="{model}",.*le="(.+)"', text)
        assert bounds == "100 500 2000 5000 +Inf".split()
    host.wait_for("ignoring 'nonsense' in summary_quantiles")


def test_metrics_can_be_disabled(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("script")
    host = serve(repository, "--allow-metrics=false").wait_started()
    with host.client() as client:
        source = "return pb_utils.MetricFamily('x', '', pb_utils.MetricFamily.GAUGE) is not None"
        assert run_script(client, source) is True
    assert host.stop() == 0
    assert "Metrics Service" not in host.output


def test_a_metrics_port_in_use_stops_the_start(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        host = serve(repository, f"--metrics-port={port}")
        assert host.process.wait(DEADLINE) == 1
    text = f"Unavailable - Socket '127.0.0.1:{port}' already in use "
    host.wait_for(re.escape(f"failed to start Metrics service: {text}"))
    host.wait_for("error: creating server: failed to start Metrics service")
    assert not host.stubs()


def test_an_embedding_program_can_read_the_metrics_port(
    repository: RepositoryBuilder,
) -> None:
    repository.copy("identity")
    options = pbhost.Options(
        model_repository=[str(repository.path)],
        allow_grpc=False,
        allow_http=False,
        metrics_port=0,
        http_address="127.0.0.1",  # also the address of the metrics port
        log_info=False,
    )
    with pbhost.BlockingServer(options) as server:
        address = f"http://127.0.0.1:{server.metrics_port}/metrics"
        with urlopen(address, timeout=DEADLINE) as response:
            assert b"nv_inference_count" in response.read()


def test_metrics_are_served_until_the_last_model_is_unloaded(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add(
        "lasting",
        """
import triton_python_backend_utils as pb_utils
from urllib.request import urlopen

class TritonPythonModel:
    def execute(self, requests):
        self.port = int(pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()[0])
        return [pb_utils.InferenceResponse([])]

    def finalize(self):
        text = urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60).read().decode()
        pb_utils.Logger.log_info(f"finalize scraped {text.count('nv_inference_count{')}")
""",
        BATCHING.replace("max_batch_size: 4", "max_batch_size: 0"),
    )
    host = serve(repository).wait_started()
    with host.client() as client:
        client.infer(
            "lasting", [tensor("X", np.array([int(host.metrics_url.split(":")[1])], np.float32))]
        )
    assert host.stop() == 0
    host.wait_for("finalize scraped 1")


def process_values(text: str) -> dict[str, float]:
    """The values of the families `process_*`, without the prefix."""
    found = re.findall(r"^process_(\w+) (\S+)$", text, re.M)
    return {name: float(value) for name, value in found}


def test_a_scrape_tells_versions_and_what_the_server_uses(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    host = serve(repository).wait_started()
    process = psutil.Process(host.process.pid)
    before = process.cpu_times()
    with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as response:
        text = response.read().decode()
    after = process.cpu_times()
    assert re.search(
        r'^pbhost_build_info\{triton_version="2\.73\.0",version="[^"]+"\} 1(\.0)?$', text, re.M
    )
    values = process_values(text)
    memory = process.memory_info()
    assert values.pop("resident_memory_bytes") == pytest.approx(memory.rss, rel=0.1)
    assert values.pop("virtual_memory_bytes") == pytest.approx(memory.vms, rel=0.1)
    assert values.pop("start_time_seconds") == pytest.approx(process.create_time(), abs=2)
    used = values.pop("cpu_seconds_total")
    tick = 0.01  # more than the error of a sum of two decimal fractions
    assert before.user + before.system - tick < used < after.user + after.system + tick
    assert values.pop("open_fds") == pytest.approx(process.num_fds(), abs=4)  # the connection
    assert values == {"max_fds": process.rlimit(psutil.RLIMIT_NOFILE)[0]}


def test_a_scrape_leaves_out_what_cannot_be_read_without_a_file_descriptor(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    host = serve(repository).wait_started()
    process = psutil.Process(host.process.pid)
    limit, most = process.rlimit(psutil.RLIMIT_NOFILE)
    with closing(http.client.HTTPConnection(host.metrics_url, timeout=DEADLINE)) as connection:

        def scrape() -> dict[str, float]:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            text = response.read().decode()
            assert response.status == 200, text
            assert "pbhost_build_info{" in text
            return process_values(text)

        before = scrape()  # the server has accepted the connection
        process.rlimit(psutil.RLIMIT_NOFILE, (3, most))
        assert scrape() == {"max_fds": 3}
        process.rlimit(psutil.RLIMIT_NOFILE, (limit, most))
        assert scrape().keys() == before.keys()
