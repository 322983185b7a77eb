"""Replicas that die, come and go while clients send requests."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.conftest import DEADLINE, MODELS, ROOT, wait_until
from tests.ray.conftest import GRPC, HAPROXY, METRICS, RayCluster, Replicas, kill

pytest.importorskip("ray", reason="ray is not installed: make test-ray")


MODELS_SERVED = ["identity", "script", "stream"]


def config(models: Sequence[str] = MODELS_SERVED, **deployment: Any) -> dict[str, Any]:
    """A configuration file of Ray Serve."""
    from host.ray.serve_config import Proxies, make_config

    if HAPROXY:
        # Nodes have ports of their own; these two are one machine, where replicas would share some.
        head = {"num_cpus": 1, "resources": {"head": 1}}
        deployment = {"ray_actor_options": head, **deployment}
    return make_config(
        {
            "model_repository": [str(MODELS), str(ROOT / "model_repository")],
            "model_control_mode": "explicit",
            "metrics_config": "histogram_latencies=true",
        },
        {"user_config": {"load_model": list(models)}, "health_check_period_s": 1, **deployment},
        Proxies("127.0.0.1", 8000, int(GRPC.split(":")[1])),
    )


@pytest.fixture(scope="module")
def served(cluster: RayCluster) -> Iterator[Replicas]:
    """One replica at first."""
    with cluster.deploy_config(config(num_replicas=1)) as replicas:
        yield replicas


CLIENTS = 4


class Load:
    """Four clients that send small requests one after the other."""

    def __init__(self) -> None:
        self.failures: list[tuple[float, str]] = []
        self.answered = 0
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(CLIENTS)]

    def _send(self) -> None:
        sent = np.zeros(4, dtype=np.float32)
        given = grpcclient.InferInput("INPUT0", [4], "FP32").set_data_from_numpy(sent)
        with grpcclient.InferenceServerClient(GRPC) as client:
            while not self._ended.is_set():
                started = time.monotonic()
                try:
                    client.infer("identity", [given], client_timeout=DEADLINE)
                    self.answered += 1
                except InferenceServerException as error:
                    self.failures.append((started, f"{error.status()} {error.message()}"))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def goes_on(self, requests: int = 100) -> None:
        """Returns once `requests` more requests are answered."""
        target = self.answered + requests
        wait_until(lambda: self.answered >= target, "requests to be answered")


def scale(served: Replicas, count: int, **deployment: Any) -> None:
    served.update(config(num_replicas=count, **deployment))
    wait_until(lambda: len(served.running()) == count, f"{count} replicas", state=served.running)


@contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """A real one, which scrapes both nodes."""
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 3s}\n"
        "scrape_configs:\n"
        f"  - {{job_name: ray, static_configs: [{{targets: {list(METRICS)}}}]}}\n"
    )
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            "--web.listen-address=127.0.0.1:9090",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("w"),
    )
    try:
        yield "http://127.0.0.1:9090"
    finally:
        process.terminate()
        process.wait()


def test_prometheus_sees_the_counters_of_each_replica(served: Replicas, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    scale(served, 2)
    with grpcclient.InferenceServerClient(GRPC) as client:
        given = grpcclient.InferInput("COMMAND", [1], "BYTES")
        given.set_data_from_numpy(np.array([b"last"], dtype=np.object_))
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error))
        client.async_stream_infer("stream", [given])
        assert answers.get(timeout=DEADLINE) is None
        client.stop_stream()

    use_each_replica(served, tmp_path)
    with prometheus(tmp_path) as url:

        def query(text: str) -> list[dict[str, Any]]:
            try:
                path = f"{url}/api/v1/query?query={urllib.parse.quote(text)}"
                with urllib.request.urlopen(path, timeout=10) as answer:
                    found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                    return found
            except OSError:
                return []  # it is starting

        counter = 'ray_nv_inference_request_success_total{model="script"}'
        wait_until(
            lambda: len([one for one in query(counter) if float(one["value"][1]) > 0]) >= 2,
            "the counters of two replicas",
            seconds=60,
            state=lambda: [query(counter), query("up"), (tmp_path / "log").read_text()[-2000:]],
        )
        replicas = {one["metric"]["replica"] for one in query(counter)}
        assert len(replicas) >= 2
        wait_until(
            lambda: bool(query('ray_nv_inference_first_response_histogram_ms_bucket{le="+Inf"}')),
            "the buckets of histograms",
            seconds=30,
            state=lambda: query('count({__name__=~"ray_nv_.*"}) by (__name__)'),
        )


def test_replicas_come_and_go_without_a_failed_request(served: Replicas) -> None:
    with Load() as load:
        scale(served, 3)
        load.goes_on()
        scale(served, 1)
        load.goes_on()
    assert not load.failures


def test_a_replica_that_starts_later_makes_the_changes_of_clients(served: Replicas) -> None:
    scale(served, 1)
    with grpcclient.InferenceServerClient(GRPC) as client:
        client.load_model("add_sub")
        client.unload_model("script")
        scale(served, 2)
        assert all(client.is_model_ready("add_sub") for _ in range(20))
        assert not any(client.is_model_ready("script") for _ in range(20))
        client.unload_model("add_sub")
        client.load_model("script")


def test_user_config_loads_and_unloads_without_a_new_replica(served: Replicas) -> None:
    scale(served, 2)
    before = sorted(served.process_ids())
    with grpcclient.InferenceServerClient(GRPC) as client:
        served.update(config(["identity", "stream", "repeat"], num_replicas=2))
        wait_until(
            lambda: all(
                client.is_model_ready("repeat") and not client.is_model_ready("script")
                for _ in range(20)
            ),
            "other models in all replicas",
        )
    assert sorted(served.process_ids()) == before
    scale(served, 2)  # with the models of before


class WaitingScript:
    """The input of requests to the model `script` that wait in it. `folder`: for its files."""

    def __init__(self, folder: Path) -> None:
        self._began, self._go_on = folder / "began", folder / "go_on"
        self._began.mkdir()
        text = (
            f"import os\nopen('{self._began}/' + str(os.getpid()), 'w').close()\n"
            f"until(lambda: os.path.exists('{self._go_on}'), 'the file')\nreturn 1"
        )
        self.given = grpcclient.InferInput("COMMAND", [1], "BYTES")
        self.given.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))

    def processes(self) -> set[int]:
        """The stubs in which a request has begun."""
        return {int(file.name) for file in self._began.iterdir()}

    def go_on(self) -> None:
        """Lets all requests end."""
        self._go_on.touch()


def use_each_replica(served: Replicas, folder: Path) -> None:
    """Lets each replica answer a request.

    A proxy may send all requests to one replica as long as that has free slots: it chooses among
    those whose queue length it knows, and asks a new one for it with a deadline of 0.1 s. So
    requests are sent, none of which ends, until each replica has one.
    """
    script = WaitingScript(folder)
    errors: list[Any] = []
    sent = 0

    def each_has_one() -> bool:
        nonlocal sent
        client.async_infer("script", [script.given], lambda result, error: errors.append(error))
        sent += 1
        running = script.processes()
        return all(
            running & {stub.pid for stub in stubs_of(replica)} for replica in served.process_ids()
        )

    with grpcclient.InferenceServerClient(GRPC) as client:
        wait_until(each_has_one, "a request in each replica", state=lambda: (sent, errors))
        script.go_on()
        wait_until(lambda: len(errors) == sent, "the requests to end")
    assert errors == [None] * sent


def stubs_of(replica: int) -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process(replica).children(recursive=True)
        if process.name().startswith("pbhost")
    ]


def lives(process: psutil.Process) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_replica_is_replaced_and_no_new_request_fails(
    served: Replicas, tmp_path: Path
) -> None:
    scale(served, 2)
    waiting: list[Any] = []
    with Load() as load, grpcclient.InferenceServerClient(GRPC) as client:
        load.goes_on()
        script = WaitingScript(tmp_path)
        for _ in range(6):
            client.async_infer(
                "script", [script.given], lambda result, error: waiting.append(error)
            )
        wait_until(lambda: bool(script.processes()), "a request to run")
        running = script.processes()
        stubs_by_replica = {replica: stubs_of(replica) for replica in served.process_ids()}
        victim, stubs = next(
            (replica, stubs)
            for replica, stubs in stubs_by_replica.items()
            if running & {stub.pid for stub in stubs}
        )
        killed = kill(victim)
        wait_until(lambda: not any(map(lives, stubs)), "no stubs of it")
        print("stubs gone after", time.monotonic() - killed)
        wait_until(
            lambda: len(pids := served.process_ids()) == 2 and victim not in pids,
            "another replica",
        )
        print("replaced after", time.monotonic() - killed)
        load.goes_on()
        wait_until(lambda: bool(waiting), "the requests that were in flight to end")
        script.go_on()
        wait_until(lambda: len(waiting) == 6, "all of them to end")
    if not HAPROXY:  # which tries again only what did not reach a replica
        assert [text for started, text in load.failures if started > killed] == []
    statuses = {text.split(" ", 1)[0] for _, text in load.failures}
    statuses |= {error.status() for error in waiting if error is not None}
    assert statuses == {"StatusCode.UNAVAILABLE"}


def test_autoscaling_follows_the_load(served: Replicas) -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 0,
        "downscale_delay_s": 1,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2,
    }
    scale(served, 1)
    served.update(config(autoscaling_config=scaling))
    with Load() as load:
        wait_until(lambda: len(served.running()) == 2, "a second replica under load")
        load.goes_on()
    wait_until(lambda: len(served.running()) == 1, "one replica without load")
    assert not load.failures


def test_a_lost_node_costs_each_client_a_request_at_most(
    cluster: RayCluster, served: Replicas
) -> None:
    scale(served, 2, ray_actor_options={"num_cpus": 1})
    nodes = {replica["node_id"] for replica in served.running()}
    assert len(nodes) == 2
    with Load() as load:
        load.goes_on()
        before = set(served.process_ids())
        cluster.remove_second_node()
        lost = time.monotonic()
        load.goes_on()
        wait_until(
            lambda: len(pids := set(served.process_ids())) == 2 and not before <= pids,
            "another replica on the other node",
        )
        replaced = time.monotonic()
        print("replaced after", replaced - lost)
        load.goes_on()
    statuses = {text.split(" ", 1)[0] for _, text in load.failures}
    assert statuses <= {"StatusCode.UNAVAILABLE"}
    if not HAPROXY:
        # The proxy learns of the loss by the first request that fails; others may be on their way.
        late = [started for started, _ in load.failures if started > lost]
        assert len(late) <= CLIENTS and all(started < replaced for started in late)
    cluster.add_second_node()
