"""Applications of Ray Serve instead of hosts, for tests that speak the protocols.

`PBHOST_TEST_RAY=app` makes the fixtures that start hosts deploy `pbhost.ray.app`, and
`PBHOST_TEST_RAY=model_apps` a deployment for each model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from host.options.flags import SWITCH
from host.options.server_flags import FLAGS
from host.ray.deployment_options import DEPLOYMENT
from tests.conftest import DEADLINE, RunningHost, list_stubs, wait_until
from tests.ray.conftest import GRPC, HTTP, ray_cluster
from tests.ray.exceptions import EXCEPTIONS, MODEL_APPS_EXCEPTIONS

_SWITCHES = {flag.field for flag in FLAGS if flag.kind is SWITCH}
_REFUSED = ("--allow-client-shm=true", "--cache-config=local,")
"""Left out, so that tests beside those of client memory and of the cache can run."""
_NAME = "pbhost"
_METRICS = {"allow_metrics": True, "metrics_address": "127.0.0.1", "metrics_port": 0}
"""Each replica has its own: tests see what the server counts, under its own names."""
_CPUS = {"app": 1.0, "model_apps": 0.1}


class RayHosts:
    """The applications of a session. The cluster has one at a time: a new one ends the last."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._current: RayHost | None = None

    def start(
        self, repository: Path, flags: Sequence[str], env: Mapping[str, str] | None
    ) -> RunningHost:
        """Deploys a repository with one replica for each deployment; it is ready then."""
        if self._current is not None:
            self._current.stop()
        arguments = {**_METRICS, **read_flags([f"--model-repository={repository}", *flags])}
        self._current = RayHost(self._kind, arguments, env or {})
        return self._current


@contextmanager
def ray_hosts(kind: str) -> Iterator[RayHosts]:
    """A cluster, and applications of that kind on it."""
    with ray_cluster(
        RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="0.1",  # half a minute for each application
        RAY_metrics_report_interval_ms="10000",  # Ray's own default
        RAY_worker_niceness="0",  # other work on the machine would hold up dozens of replicas
        TRITON_SERVER_ESCAPE_LOG_MESSAGES="0",
    ):
        yield RayHosts(kind)


def arrange(kind: str, items: list[pytest.Item]) -> None:
    """Skips exceptions, and moves tests with an application of their own to the end of their file.

    The application that a file's tests share is gone then.
    """
    files: dict[Path, int] = {}
    for item in items:
        files.setdefault(item.path, len(files))
    items.sort(key=lambda one: (files[one.path], "serve" in getattr(one, "fixturenames", ())))
    exceptions = MODEL_APPS_EXCEPTIONS if kind == "model_apps" else EXCEPTIONS
    for item in items:
        name = f"{item.path.name}::{item.name}"
        reason = exceptions.get(name) or exceptions.get(name.split("[")[0])
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def read_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Flags of `pbhost serve` as arguments of an application, without those that it refuses."""
    found: dict[str, Any] = {}
    for flag in flags:
        name, _, value = flag.removeprefix("--").partition("=")
        field = name.replace("-", "_")
        if field in _SWITCHES:
            found[field] = True
        elif not flag.startswith(_REFUSED):
            found[field] = [*found.get(field, ()), value]
    return found


class RayHost(RunningHost):
    """An application, as the tests of a host see it: its proxies, its replicas and their logs."""

    process: Any
    """The process of the replica that clients reach."""

    def __init__(self, kind: str, arguments: Mapping[str, Any], env: Mapping[str, str]) -> None:
        from ray import serve

        self._read_before = {log: log.stat().st_size for log in _logs()}
        self._running = True
        self.port = int(GRPC.rpartition(":")[2])
        try:
            serve.run(_bind(kind, arguments, env), name=_NAME, route_prefix="/")
        except BaseException:  # also Ctrl-C: Ray would start its replicas again and again
            self.stop()
            raise
        (self.process,) = self.replicas(DEPLOYMENT)

    @property
    def lines(self) -> list[str]:
        """The lines that its replicas, and Ray Serve's own actors, have printed by now."""
        found: list[str] = []
        for log in _logs():
            with log.open(errors="replace") as file:
                file.seek(self._read_before.get(log, 0))
                found += file.read().splitlines()
        return found

    def wait_for(self, pattern: str, seconds: float = DEADLINE) -> re.Match[str]:
        """The first match of the pattern in its output so far or to come."""
        found: list[re.Match[str]] = []

        def printed() -> bool:
            found.extend(re.finditer(pattern, self.output))
            return bool(found)

        wait_until(printed, f"{pattern!r} in:\n", seconds, lambda: self.output)
        return found[0]

    def wait_started(self) -> RunningHost:
        """Returns once the proxies pass requests to it, also if it refuses them without a key."""

        def answers_grpc() -> bool:
            try:
                with grpcclient.InferenceServerClient(GRPC) as client:
                    return bool(client.is_server_live())
            except InferenceServerException as error:
                return "restricted" in error.message()

        def answers_http() -> bool:
            try:
                with urlopen(f"http://{HTTP}/v2/health/live", timeout=DEADLINE):
                    return True
            except HTTPError as error:
                return b"restricted" in error.read()
            except OSError:
                return False

        wait_until(lambda: answers_grpc() and answers_http(), "the proxies to know the application")
        return self

    @property
    def http_url(self) -> str:
        """Host and port of the proxy for HTTP."""
        return HTTP

    def read_metrics(self) -> str:
        """The pages of the metrics of all replicas that run, one after the other."""
        pages = []
        for port in re.findall(r"Started Metrics Service at \S+:(\d+)", self.output):
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                pages.append(answer.read().decode())
        return "".join(pages)

    def replicas(self, deployment: str = "") -> list[psutil.Process]:
        """The processes of the replicas that run, of all deployments or of one."""
        # The public status has no process ids.
        from ray.serve._private.api import _get_global_client

        details = _get_global_client().get_serve_details()
        return [
            psutil.Process(replica["pid"])
            for name, one in details["applications"][_NAME]["deployments"].items()
            for replica in one["replicas"]
            if replica["state"] == "RUNNING" and deployment in ("", name)
        ]

    def stubs(self, instance: str = "") -> list[psutil.Process]:
        """The live stub processes of its replicas, all or those of one instance."""
        return [stub for replica in self.replicas() for stub in list_stubs(replica.pid, instance)]

    def stop(self, number: int = 0, seconds: float = DEADLINE) -> int:
        """Ends the application. It has no status, so this is 0."""
        from ray import serve

        if self._running:
            self._running = False
            serve.delete(_NAME)
        return 0


def _bind(kind: str, arguments: Mapping[str, Any], env: Mapping[str, str]) -> Any:
    import pbhost.ray

    actor = {"num_cpus": _CPUS[kind], "runtime_env": {"env_vars": dict(env)}}
    options = {"ray_actor_options": actor} if env else {}
    if kind == "app":
        return pbhost.ray.app({**arguments, "deployment": options})
    repositories = map(Path, arguments["model_repository"] if env else ())
    models = [path.name for one in repositories for path in one.iterdir() if path.is_dir()]
    return pbhost.ray.model_apps({**arguments, "deployments": dict.fromkeys(models, options)})


def _logs() -> list[Path]:
    folder = Path(os.environ["RAY_TMPDIR"], "ray")
    return sorted(folder.glob("session_2*/logs/worker-*"))
