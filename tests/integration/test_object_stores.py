"""Repositories in object stores: fetched when a model loads, kept in a cache, served as folders."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from selenium.webdriver.common.by import By
from tritonclient.utils import InferenceServerException

from host.options.options import Options
from host.ray.deployment_options import read_requirements
from host.ray.model_deployments import model_deployments
from tests.browser import WebPage, open_browser
from tests.clients import run_command
from tests.conftest import (
    DEADLINE,
    NEW_INTERPRETER,
    RepositoryBuilder,
    RunningHost,
    Serve,
    wait_until,
)
from tests.integration.control_models import CONFIG
from tests.integration.memory_budget_models import budget, evictions, large
from tests.integration.on_demand_models import ON_DEMAND
from tests.object_stores import ENVIRONMENT, Fault, S3Server

pytest.importorskip("moto.server", reason="needs moto's server (pip install 'moto[server]')")
pytest.importorskip("obstore", reason="needs pbhost[cloud]")

SCALE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "Y", "data_type": "TYPE_INT32", "dims": [1]})
        return config

    def initialize(self, args):
        with open(args["model_repository"] + f"/{args['model_version']}/factor") as file:
            self.factor = int(file.read())

    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.multiply(request)]) for request in requests]

    def multiply(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        return pb_utils.Tensor("Y", given * self.factor)
"""
ALL_VERSIONS = "version_policy { all {} }\n"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def prefix(s3: S3Server, request: pytest.FixtureRequest) -> str:
    """A place of its own in the bucket for each test."""
    s3.objects_read()
    s3.fault = None
    return re.sub(r"\W", "-", request.node.name)


def scale(factor: int, version: int = 1) -> dict[str, bytes | str]:
    """A version of a model that multiplies."""
    return {f"{version}/model.py": SCALE, f"{version}/factor": str(factor)}


def ask(client: grpcclient.InferenceServerClient, model: str, version: str = "") -> int:
    """What the model makes of 1."""
    given = grpcclient.InferInput("X", [1], "INT32")
    given.set_data_from_numpy(np.ones(1, np.int32))
    return int(client.infer(model, [given], version).as_numpy("Y")[0])


def test_models_of_buckets_and_folders_are_served_together(
    s3: S3Server, prefix: str, repository: RepositoryBuilder, tmp_path: Path, serve: Serve
) -> None:
    s3.put_files(f"{prefix}/a/doubles", scale(2))
    s3.put_files(f"{prefix}/b/triples", scale(3))
    repository.add("quadruples", SCALE, files={"1/factor": "4"})
    flags = [
        f"--model-repository={s3.url(f'{prefix}/b')}/",
        f"--model-repository={repository.path}",
        f"--repository-cache-directory={tmp_path / 'cache'}",
    ]
    host = serve(s3.url(f"{prefix}/a"), *flags, env=ENVIRONMENT).wait_started()
    with host.client() as client:
        assert [ask(client, name) for name in ("doubles", "triples", "quadruples")] == [2, 3, 4]
        names = {model.name for model in client.get_model_repository_index().models}
    assert names == {"doubles", "triples", "quadruples"}


def test_a_killed_server_that_starts_again_fetches_what_it_lacks(
    s3: S3Server, prefix: str, tmp_path: Path, serve: Serve
) -> None:
    s3.put_files(f"{prefix}/doubles", {**scale(2), "config.pbtxt": 'backend: "python"'})
    flags = [s3.url(prefix), f"--repository-cache-directory={tmp_path / 'cache'}"]
    hold, reached = threading.Event(), threading.Event()

    def wait(environ: dict[str, Any], *_: object) -> None:
        if environ["PATH_INFO"].endswith("factor"):
            reached.set()
            hold.wait(DEADLINE)

    def complete() -> list[str]:
        return [path.name for path in tmp_path.glob("cache/*/objects/*") if not path.suffix]

    s3.fault = wait
    host = serve(*flags, env=ENVIRONMENT)
    try:
        assert reached.wait(DEADLINE)
        wait_until(lambda: len(complete()) == 2, "the other objects", state=complete)
        host.process.kill()
        host.stop()
    finally:
        hold.set()
        s3.fault = None
    files = ("1/factor", "1/model.py", "config.pbtxt")
    assert sorted(s3.objects_read()) == [f"{prefix}/doubles/{file}" for file in files]
    for fetched in [f"{prefix}/doubles/1/factor"], []:
        host = serve(*flags, env=ENVIRONMENT).wait_started()
        with host.client() as client:
            assert ask(client, "doubles") == 2
        assert s3.objects_read() == fetched
        host.process.kill()
        host.stop()


def test_a_load_fetches_only_what_has_changed(
    s3: S3Server, prefix: str, tmp_path: Path, serve: Serve
) -> None:
    s3.put_files(f"{prefix}/scale", {**scale(2), "config.pbtxt": ALL_VERSIONS})
    host = serve(
        s3.url(prefix),
        f"--repository-cache-directory={tmp_path / 'cache'}",
        "--model-control-mode=explicit",
        env=ENVIRONMENT,
    ).wait_started()
    with host.client() as client:
        client.load_model("scale")
        stubs = [stub.pid for stub in host.stubs()]
        s3.objects_read()
        client.load_model("scale")
        assert s3.objects_read() == []
        s3.put_files(f"{prefix}/scale", scale(3, version=2))
        client.load_model("scale")
        assert sorted(s3.objects_read()) == [
            f"{prefix}/scale/2/{x}" for x in ("factor", "model.py")
        ]
        assert [ask(client, "scale", version) for version in ("1", "2")] == [2, 3]
        assert set(stubs) < {stub.pid for stub in host.stubs()}, "version 1 was loaded again"
        s3.put(f"{prefix}/scale/2/factor", "5")
        client.load_model("scale")
        assert s3.objects_read() == [f"{prefix}/scale/2/factor"]
        assert [ask(client, "scale", version) for version in ("1", "2")] == [2, 5]

        changes = {"2/factor": "7"}

        def change(environ: dict[str, Any], *_: object) -> None:
            if environ["PATH_INFO"].endswith("2/factor"):
                s3.fault = None
                s3.put_files(f"{prefix}/scale", changes)

        s3.put(f"{prefix}/scale/2/factor", "6")
        s3.fault = change
        client.load_model("scale")
        assert ask(client, "scale", "2") == 7
        stubs = [stub.pid for stub in host.stubs()]  # also one that ends
        client.load_model("scale")
        assert {stub.pid for stub in host.stubs()} <= set(stubs), "the same files again"
        changes = {"2/factor": "9", "1/factor": "4"}
        s3.put(f"{prefix}/scale/2/factor", "8")
        s3.fault = change
        client.load_model("scale")  # version 1 was not to be loaded again
        assert [ask(client, "scale", version) for version in ("1", "2")] == [2, 9]
        client.load_model("scale")
        assert [ask(client, "scale", version) for version in ("1", "2")] == [4, 9]
        with pytest.raises(InferenceServerException, match="failed to load 'other'"):
            client.load_model("other")


def test_polls_compare_listings(s3: S3Server, prefix: str, tmp_path: Path, serve: Serve) -> None:
    s3.put_files(f"{prefix}/scale", scale(2))
    host = serve(
        s3.url(prefix),
        f"--repository-cache-directory={tmp_path / 'cache'}",
        "--model-control-mode=poll",
        "--repository-poll-secs=1",
        env=ENVIRONMENT,
    ).wait_started()
    with host.client() as client:
        assert ask(client, "scale") == 2
        s3.objects_read()
        s3.put_files(f"{prefix}/new", scale(7))
        wait_until(lambda: client.is_model_ready("new"), "a new model")
        assert {key.split("/")[1] for key in s3.objects_read()} == {"new"}
        s3.put(f"{prefix}/scale/1/factor", "3")
        wait_until(lambda: ask(client, "scale") == 3, "the changed model")
        assert s3.objects_read() == [f"{prefix}/scale/1/factor"]
        for file in scale(7):
            s3.delete(f"{prefix}/new/{file}")
        wait_until(lambda: not client.is_model_ready("new"), "the model to be unloaded")


PROGRESS = r"fetching [0-9.]+M of 3.0M, [0-9.]+.?/s, [0-9]+ s left from s3://"


def slow_weights(hold: threading.Event, reached: threading.Event) -> Fault:
    """A fault that lets the last of 3 MiB wait."""

    def slow(environ: dict[str, Any], start: Callable[..., Any], store: Any) -> Any:
        if not environ["PATH_INFO"].endswith("weights"):
            return None
        body = b"".join(store(environ, start))

        def send() -> Iterator[bytes]:
            yield body[: 2 << 20]
            reached.set()
            hold.wait(DEADLINE)
            yield body[2 << 20 :]

        return send()

    return slow


def test_metrics_and_the_overview_tell_of_fetches(
    s3: S3Server, prefix: str, tmp_path: Path, serve: Serve
) -> None:
    s3.put_files(f"{prefix}/scale", {**scale(2), "1/weights": b"w" * (3 << 20)})
    host = serve(
        s3.url(prefix),
        f"--repository-cache-directory={tmp_path / 'cache'}",
        "--model-control-mode=explicit",
        env=ENVIRONMENT,
    ).wait_started()
    hold, reached = threading.Event(), threading.Event()

    def overview() -> str:
        with urlopen(f"http://{host.http_url}/v2/overview", timeout=DEADLINE) as answer:
            return str(answer.read())

    s3.fault = slow_weights(hold, reached)
    with host.client() as client, ThreadPoolExecutor(1) as executor:
        loading = executor.submit(client.load_model, "scale")
        assert reached.wait(DEADLINE)
        wait_until(
            lambda: re.search(PROGRESS, overview()) is not None, "the progress", state=overview
        )
        hold.set()
        loading.result(DEADLINE)
        metrics = host.read_metrics()
        hold.clear()
        s3.put(f"{prefix}/scale/1/weights", b"x" * (3 << 20))
        loading = executor.submit(client.load_model, "scale")
        wait_until(
            lambda: re.search(f'"READY",[^}}]*{PROGRESS}', overview()) is not None,
            "the progress of a new load",
            state=overview,
        )
        hold.set()
        loading.result(DEADLINE)
    where = f'repository="{s3.url(prefix)}"'
    size = sum(map(len, scale(2).values())) + (3 << 20)
    assert f"pbhost_repository_fetched_bytes_total{{{where}}} {size}" in metrics
    assert f'pbhost_repository_objects_total{{{where},result="fetched"}} 3' in metrics
    assert f"pbhost_repository_failures_total{{{where}}} 0" in metrics


@pytest.fixture(scope="module")
def on_demand(
    s3: S3Server, tmp_path_factory: pytest.TempPathFactory, module_serve: Serve
) -> RunningHost:
    """A host that loads on demand, with a memory budget in which one of two models fits."""
    for name in "ab":
        s3.put_files(f"on-demand/{name}", {"config.pbtxt": CONFIG, "1/model.py": large(name)})
    s3.put_files("on-demand/scale", {**scale(2), "1/weights": b"w" * (3 << 20)})
    cache = f"--repository-cache-directory={tmp_path_factory.mktemp('cache')}"
    url = s3.url("on-demand")
    flags = (ON_DEMAND, budget(1), cache)
    host = module_serve(url, *flags, env=ENVIRONMENT, program=NEW_INTERPRETER)
    return host.wait_started()


def test_a_model_that_made_room_in_the_memory_budget_is_loaded_again_from_the_cache(
    s3: S3Server, on_demand: RunningHost
) -> None:
    s3.objects_read()
    with on_demand.client() as client:
        for name in "aba":
            assert run_command(client, "name", name) == name
    assert [evictions(on_demand, name) for name in "ab"] == [1, 1]
    assert sorted(s3.objects_read()) == [f"on-demand/{name}/1/model.py" for name in "ab"]


def test_the_dashboard_shows_how_far_a_fetch_is(
    s3: S3Server, on_demand: RunningHost, tmp_path: Path
) -> None:
    hold, reached = threading.Event(), threading.Event()
    s3.fault = slow_weights(hold, reached)
    with (
        open_browser(tmp_path) as browser,
        on_demand.client() as client,
        ThreadPoolExecutor(1) as executor,
    ):
        asked = executor.submit(ask, client, "scale")
        try:
            assert reached.wait(DEADLINE)
            WebPage(browser, on_demand, "/dashboard").wait_for("#models tbody", PROGRESS)
            assert browser.find_elements(By.CSS_SELECTOR, "#models .reason.bad:not(:empty)") == []
        finally:
            s3.fault = None
            hold.set()
        assert asked.result(DEADLINE) == 2


def test_a_signal_while_a_model_is_fetched_ends_the_server(
    s3: S3Server, prefix: str, tmp_path: Path, serve: Serve
) -> None:
    s3.put_files(f"{prefix}/scale", scale(2))
    hold, reached = threading.Event(), threading.Event()

    def wait(environ: dict[str, Any], *rest: Any) -> Any:
        if environ["PATH_INFO"].endswith("factor"):
            reached.set()
            hold.wait(DEADLINE)

    s3.fault = wait
    flags = [s3.url(prefix), f"--repository-cache-directory={tmp_path / 'cache'}"]
    try:
        host = serve(*flags, env=ENVIRONMENT)
        assert reached.wait(DEADLINE)
        assert host.stop() == 0
    finally:
        hold.set()
    s3.fault = None
    host = serve(*flags, env=ENVIRONMENT).wait_started()
    with host.client() as client:
        assert ask(client, "scale") == 2


def test_the_served_version_goes_on_while_the_store_fails(
    s3: S3Server, prefix: str, tmp_path: Path, serve: Serve
) -> None:
    s3.put_files(f"{prefix}/scale", scale(2))
    host = serve(
        s3.url(prefix),
        f"--repository-cache-directory={tmp_path / 'cache'}",
        "--model-control-mode=on-demand",
        "--repository-timeout-secs=1",
        env=ENVIRONMENT,
    ).wait_started()

    def refuse(environ: dict[str, Any], start: Callable[..., Any], store: Any) -> Any:
        if environ["PATH_INFO"].endswith("factor"):
            start("503 Slow Down", [("Content-Length", "0")])
            return []
        return None

    with host.client() as client:
        assert ask(client, "scale") == 2  # loaded on demand
        s3.put(f"{prefix}/scale/1/factor", "3")
        s3.fault = refuse
        with pytest.raises(InferenceServerException, match=r"factor' within 1 s: .* 503"):
            client.load_model("scale")
        assert ask(client, "scale") == 2
        s3.fault = None
        client.load_model("scale")
        assert ask(client, "scale") == 3
        s3.put_files(f"{prefix}/new", scale(7))
        assert ask(client, "new") == 7  # it was not there when the server started


def test_subcommands_take_urls(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    config = 'backend: "python"\nmax_batch_sise: 4\n'
    weights: dict[str, bytes | str] = {"2/weights": b"w" * (2 << 20)}
    s3.put_files(f"{prefix}/scale", {**scale(5), **scale(2, version=2), **weights})
    s3.put_files(f"{prefix}/wrong", {**scale(2), "config.pbtxt": config})
    cache = f"--repository-cache-directory={tmp_path / 'cache'}"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pbhost", *arguments, cache]
        environment = {**os.environ, **ENVIRONMENT}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    checked = run("check", s3.url(prefix))
    assert checked.returncode == 1
    assert checked.stdout.startswith(f"{s3.url(prefix)}/wrong/config.pbtxt:2:1: error: ")
    read = sorted(key for key in s3.objects_read() if "/scale/" in key)
    assert read == [f"{prefix}/scale/2/{name}" for name in ("factor", "model.py")]
    shown = run("config", f"{s3.url(prefix)}/scale")
    assert (shown.returncode, 'name: "scale"' in shown.stdout) == (0, True), shown
    ran = run("run", f"{s3.url(prefix)}/scale", "--input", "X=[21]")
    assert (ran.returncode, "[42]" in ran.stdout) == (0, True), ran
    missing = run("run", f"{s3.url(prefix)}/other")
    assert missing.stderr.endswith("model 'other': model not found in any model repository.\n")


def test_deployments_of_ray_know_the_models_of_a_store(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    s3.put_files(f"{prefix}/scale", {**scale(2), "config.pbtxt": "sequence_batching {}"})
    options = Options(
        model_repository=[s3.url(prefix)], repository_cache_directory=str(tmp_path / "cache")
    )
    found = read_requirements(options)
    assert (found.models, found.sequence_models, found.unreadable) == (["scale"], ["scale"], {})
    assert [part.model for part in model_deployments(options, {})] == ["scale"]
    assert {key.rsplit("/")[-1] for key in s3.objects_read()} == {"config.pbtxt"}
