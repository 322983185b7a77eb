"""Measures a model behind Ray Serve against one server alone, on this machine.

    .venv-ray/bin/python -m benchmarks.ray [--mode MODE ...] [--replicas 2] [--seconds 4]

Modes: alone, two-alone, proxy, haproxy, port, models, models-haproxy.

Each mode starts a cluster of one node with that many replicas, and asks for a small tensor over
gRPC, from one process with 8 requests in progress; client, proxy and replicas share the CPUs.
Replicas have the priority of the client. Ray starts them with a lower one (RAY_worker_niceness=15),
so that a client on the same CPUs interrupts them for each response.
`alone` is one server without Ray, `two-alone` are two on one port; `models` has as many of
each model's deployment, behind one of the ingress. It prints requests per second (the median of
three runs), milliseconds for each response of a stream of 1,000, the time from the start to the
first answer, the memory of each replica with its stubs, and the CPU time that a request costs the
client, the servers with their stubs, HAProxy and all other processes. It needs root, as the tests
of Ray do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2 as pb

from host.system.resources import proportional_bytes

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "tests" / "models"
PORT = 9000
OWN_PORT = 9500
CLIENTS = 8


@contextmanager
def alone(servers: int, arguments: Sequence[str]) -> Iterator[list[int]]:
    """Servers without Ray on one port; yields their processes."""
    command = [
        *(sys.executable, "-m", "pbhost", "serve", f"--model-repository={MODELS}"),
        *(f"--grpc-port={PORT}", "--allow-http=false", "--allow-metrics=false"),
        *("--model-control-mode=explicit", "--load-model=identity", "--load-model=stream"),
        *(f"--{one.replace('_', '-')}" for one in arguments),
        *(["--reuse-grpc-port=true"] if servers > 1 else []),
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(servers)]
    try:
        wait_for(PORT, servers)
        for process in processes:
            if process.poll() is not None:
                raise RuntimeError(f"a server has ended with status {process.returncode}")
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


@contextmanager
def behind_ray(mode: str, replicas: int, arguments: Sequence[str]) -> Iterator[list[int]]:
    """Replicas; yields their processes. `arguments`: NAME=VALUE, of the application."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ.update(RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.pop("RAY_SERVE_ENABLE_HA_PROXY", None)
    if mode.endswith("haproxy"):
        os.environ.update(
            RAY_SERVE_ENABLE_HA_PROXY="1",
            RAY_SERVE_HAPROXY_CONFIG_FILE_LOC=f"{folder}/haproxy.cfg",
            RAY_SERVE_HAPROXY_SOCKET_PATH=f"{folder}/admin.sock",
            RAY_SERVE_HAPROXY_SERVER_STATE_BASE=folder,
            RAY_SERVE_HAPROXY_SERVER_STATE_FILE=f"{folder}/server-state",
        )
    import ray
    from ray import serve

    from pbhost.ray import app, model_apps

    ports = {"allow_grpc": True, "grpc_port": OWN_PORT, "reuse_grpc_port": True}
    try:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        serve.start(
            http_options={"host": "127.0.0.1", "port": 8000},
            grpc_options={
                "port": PORT,
                "grpc_servicer_functions": ["pbhost.ray.add_servicer"],
            },
        )
        models = ["identity", "stream"]
        common = {
            "model_repository": str(MODELS),
            "model_control_mode": "explicit",
            "load_model": models,
            **(ports if mode == "port" else {}),
            **dict(one.split("=", 1) for one in arguments),
        }
        deployment = {"num_replicas": replicas}
        if mode.startswith("models"):
            application = model_apps({**common, "deployments": dict.fromkeys(models, deployment)})
        else:
            application = app({**common, "deployment": deployment})
        serve.run(application, name="pbhost", route_prefix="/")
        wait_for(OWN_PORT, replicas) if mode == "port" else wait_for(PORT)
        yield [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if "ServeReplica:pbhost" in " ".join(process.info["cmdline"] or ())
        ]
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(port: int, servers: int = 1) -> None:
    """Returns once as many servers listen at the port, and 20 answers in a row say ready."""
    end = time.monotonic() + 60
    missing = 20
    while time.monotonic() < end:
        # The kernel sends connections to those that listen, so answers alone prove one server.
        if count_listeners(port) < servers:
            time.sleep(0.05)
            continue
        try:
            own = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
            address = f"127.0.0.1:{port}"
            with grpcclient.InferenceServerClient(address, channel_args=own) as client:
                missing = missing - 1 if client.is_server_ready() else 20
                if not missing:
                    return
        except grpcclient.InferenceServerException:
            missing = 20
            time.sleep(0.05)
    raise TimeoutError(f"{count_listeners(port)} of {servers} servers are ready at port {port}")


def count_listeners(port: int) -> int:
    """Sockets that listen at a port."""
    sockets: Any = psutil.net_connections("tcp")  # its type allows an address without a port
    return sum(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in sockets)


def small_request() -> bytes:
    """A request of four numbers, encoded."""
    message = pb.ModelInferRequest(model_name="identity")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[4])
    message.raw_input_contents.append(np.zeros(4, np.float32).tobytes())
    data: bytes = message.SerializeToString()
    return data


async def count_requests(port: int, seconds: float) -> float:
    """Requests per second, over one connection for each request in progress."""
    request = small_request()
    end = time.perf_counter() + seconds

    async def ask() -> int:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as typed:
            channel: Any = typed  # messages are bytes, without serializers
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            count = 0
            while time.perf_counter() < end:
                await infer(request)
                count += 1
            return count

    return sum(await asyncio.gather(*(ask() for _ in range(CLIENTS)))) / seconds


async def time_stream(port: int, responses: int) -> float:
    """Milliseconds for each response of a stream."""
    message = pb.ModelInferRequest(model_name="stream")
    message.inputs.add(name="COMMAND", datatype="BYTES", shape=[1])
    text = f"many={responses} final".encode()
    message.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as typed:
        channel: Any = typed
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        began = time.perf_counter()
        await call.write(message.SerializeToString())
        await call.done_writing()
        count = 0
        async for _ in call:
            count += 1
        assert count == responses, count
        return (time.perf_counter() - began) / responses * 1000


def memory_of(pid: int) -> float:
    """MB of a process and its children, shared pages by their share."""
    processes = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return sum(proportional_bytes(each) or 0 for each in processes) / 1e6


class CpuTimes:
    """CPU time of processes since the start, by what they do."""

    def __init__(self, replicas: Sequence[int]) -> None:
        self._own = psutil.Process()
        self._replicas = _families(replicas)
        self._others = _families([self._own.pid]) - self._replicas - {self._own}
        self._start = self._read()

    def _read(self) -> dict[str, float]:
        groups = {"client": {self._own}, "servers": self._replicas}
        groups["proxies"] = {one for one in self._others if "haproxy" in _name_of(one)}
        groups["others"] = self._others - groups["proxies"]
        return {name: sum(map(_seconds_of, group)) for name, group in groups.items()}

    def per_request(self, requests: float) -> str:
        """Microseconds of each group for a request."""
        now = self._read()
        return ", ".join(
            f"{name} {(now[name] - before) / requests * 1e6:.0f}"
            for name, before in self._start.items()
        )


def _families(pids: Sequence[int]) -> set[psutil.Process]:
    """Processes with their children."""
    found = {psutil.Process(pid) for pid in pids}
    return found.union(*(one.children(recursive=True) for one in found))


def _name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:  # also a zombie
        return ""


def _seconds_of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def main() -> None:
    """Measures each mode, and prints a line for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", nargs="*", default=["alone", "proxy", "haproxy", "port"])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--argument", nargs="*", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    if len(options.mode) > 1:  # Ray reads its environment once
        for mode in options.mode:
            command = [sys.executable, "-m", "benchmarks.ray", "--mode", mode]
            command += [f"--replicas={options.replicas}", f"--seconds={options.seconds}"]
            command += ["--argument", *options.argument]
            subprocess.run(command, check=True, cwd=ROOT)
        return
    (mode,) = options.mode
    began = time.monotonic()
    servers = {"alone": 1, "two-alone": 2}.get(mode)
    started_servers = (
        alone(servers, options.argument)
        if servers
        else behind_ray(mode, options.replicas, options.argument)
    )
    with started_servers as replicas:
        started = time.monotonic() - began
        port = OWN_PORT if mode == "port" else PORT
        asyncio.run(count_requests(port, 1.0))
        times = CpuTimes(replicas)
        rates = [asyncio.run(count_requests(port, options.seconds)) for _ in range(3)]
        cpu = times.per_request(sum(rates) * options.seconds)
        streams = [asyncio.run(time_stream(port, 1000)) for _ in range(3)]
        memory = [round(memory_of(pid)) for pid in replicas]
        print(
            f"{mode}: {statistics.median(rates):.0f} requests/s, "
            f"{statistics.median(streams):.2f} ms a response, ready after {started:.1f} s, "
            f"MB of each replica: {memory}, µs of CPU for a request: {cpu}",
            flush=True,
        )


if __name__ == "__main__":
    main()
