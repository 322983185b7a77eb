"""The alert rules and the Grafana dashboard of deploy/, with a real Prometheus and a real host."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import yaml

from tests.clients import tensor
from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.openai_models import LETTERS, LETTERS_CONFIG, complete

RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
RULE_TESTS = ROOT / "tests" / "deploy" / "alerts.test.yml"
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "pbhost.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
VARIABLES = {"$job": "pbhost", "$server": ".+", "$model": ".+"}
INTERVALS = {"$__rate_interval": "1m", "$__range": "1m"}
ALERTS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]

BATCHED = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())
        ]) for request in requests]
"""
BATCHED_CONFIG = """
backend: "python"
max_batch_size: 4
dynamic_batching { }
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""


class Prometheus:
    """A Prometheus that scrapes a host every second."""

    def __init__(self, folder: Path, host: RunningHost) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        config = yaml.safe_load(CONFIG.read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [host.metrics_url]}]
        config["rule_files"] = [str(RULES)]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.output = folder / "prometheus.log"
        with self.output.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )

    def get(self, path: str, **parameters: str) -> Any:
        response = requests.get(f"{self._url}/api/v1/{path}", parameters, timeout=DEADLINE)
        answer = response.json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression returns now."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def answers(self) -> bool:
        assert self.process.poll() is None, self.output.read_text()
        try:
            ready = requests.get(f"{self._url}/-/ready", timeout=DEADLINE).ok
        except requests.ConnectionError:
            return False
        return ready and bool(self.query("count_over_time(up[1m]) > 3"))


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("identity")
    module_repository.add("letters", LETTERS, LETTERS_CONFIG)
    module_repository.add("batched", BATCHED, BATCHED_CONFIG)
    flags = ("--metrics-config=summary_latencies=true", "--memory-budget=8589934592")
    return module_serve(module_repository, *flags).wait_started()


def send_requests(host: RunningHost) -> None:
    """Asks every model."""
    with host.client() as client:
        client.infer("identity", [tensor("INPUT0", np.zeros(4, np.float32))])
        client.infer("batched", [tensor("X", np.zeros((1, 4), np.float32))])
    assert complete(host, "a|b|c", stream=True).events[-1] == "[DONE]"


@pytest.fixture(scope="module")
def prometheus(host: RunningHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("needs the program prometheus (Debian: apt-get install prometheus)")
    send_requests(host)  # series exist before the first scrape, so that their rates are known
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), host)
    try:
        wait_until(running.answers, "the first scrapes of Prometheus")
        send_requests(host)
        yield running
    finally:
        running.process.terminate()
        running.process.wait(DEADLINE)


def fill_in(expression: str) -> str:
    """An expression of the dashboard as Grafana sends it."""
    for name, value in {**INTERVALS, **VARIABLES}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def has_data(prometheus: Prometheus, query: str) -> bool:
    return bool(prometheus.query(query))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel['id']}: {panel['title']}")
def test_every_expression_of_a_panel_returns_data(
    prometheus: Prometheus, panel: dict[str, Any]
) -> None:
    for target in panel.get("targets", []):
        query = fill_in(target["expr"])
        wait_until(partial(has_data, prometheus, query), f"data of {query}")
        wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for series in prometheus.query(query):
            assert wanted <= set(series["metric"]), series["metric"]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_rule_watches_series_that_exist(prometheus: Prometheus, rule: dict[str, Any]) -> None:
    watched, *thresholds = re.split(r"\s(?:==|>)\s", rule["expr"])
    assert len(thresholds) == 1
    wait_until(partial(has_data, prometheus, watched), f"data of {watched}")
    for name in re.findall(r"\b(?:nv|pbhost|process)_\w+", rule["expr"]):
        assert prometheus.query(name), name


def test_the_choices_of_the_dashboard_exist(prometheus: Prometheus) -> None:
    found = {}
    for variable in DASHBOARD["templating"]["list"][1:]:
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert match is not None
        found[variable["name"]] = set(
            prometheus.get(f"label/{match[2]}/values", **{"match[]": fill_in(match[1])})
        )
    assert found["job"] == {"pbhost"}
    assert len(found["server"]) == 1
    assert found["model"] == {"identity", "letters", "batched"}


def test_a_healthy_server_raises_no_alert_and_a_dead_process_does(
    prometheus: Prometheus, host: RunningHost
) -> None:
    rules = prometheus.get("rules")["groups"][0]["rules"]
    assert [(rule["name"], rule["health"], rule["state"]) for rule in rules] == [
        (rule["alert"], "ok", "inactive") for rule in ALERTS
    ]
    (stub,) = host.stubs("identity_0")
    stub.kill()
    wait_until(
        lambda: bool(prometheus.query('ALERTS{alertname="PbhostProcessDied",model="identity"}')),
        "the alert about the process",
    )
    alerts = prometheus.get("alerts")["alerts"]  # a slow machine may have caused others, too
    (alert,) = (one for one in alerts if one["labels"]["alertname"] == "PbhostProcessDied")
    assert alert["annotations"]["summary"] == (
        "A process of model identity (identity_0) died and was replaced."
    )


def check_with_promtool(*arguments: str | Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs the program promtool (Debian: apt-get install prometheus)")
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_valid() -> None:
    check_with_promtool("check", "config", CONFIG)


def test_every_alert_fires_where_it_should_and_not_beside() -> None:
    check_with_promtool("test", "rules", RULE_TESTS)
    (group,) = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    fired = {case["alertname"] for case in group["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in ALERTS}


def test_panels_do_not_overlap() -> None:
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in PANELS
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
