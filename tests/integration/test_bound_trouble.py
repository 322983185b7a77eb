"""Programs that use `host.bind` incorrectly or in unusual ways."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from host.bind import BadSpecError, DynamicBatcher, Host, HostFailure, TensorSpec, batch
from tests.clients import tensor
from tests.conftest import DEADLINE, ROOT
from tests.working_directory import without_directory

X = TensorSpec(name="x", dtype=np.float32, shape=(-1,))
Y = TensorSpec(name="y", dtype=np.float32, shape=(-1,))

double = batch(lambda x: [2 * x])


def new_host(**flags: Any) -> Host:
    return Host(grpc_port=0, allow_http=False, allow_metrics=False, **flags)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with new_host() as host:
        host.bind("double", double, [X], [Y])
        yield host.run()


def send_request(host: Host, model: str = "double") -> Any:
    """Returns the response of the model to [1, 2]."""
    with grpcclient.InferenceServerClient(host.grpc_url) as client:
        given = tensor("x", np.array([[1, 2]], dtype=np.float32))
        result: Any = client.infer(model, [given])
        return result.as_numpy("y").tolist()


@pytest.mark.parametrize(
    "name", [".", "a\0b", "n" * 256, " double", 5], ids=["dot", "NUL", "long", "space", "number"]
)
def test_an_invalid_model_name_does_not_affect_other_models(host: Host, name: Any) -> None:
    with pytest.raises(BadSpecError, match=r"name of a model.*must be"):
        host.bind(name, double, [X], [Y])
    assert send_request(host) == [[2, 4]]
    with grpcclient.InferenceServerClient(host.grpc_url) as client:
        client.load_model("double")  # the files of the model exist


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model_version": -1}, "model_version of 'm' must be an int from 0 on, got -1"),
        ({"model_version": "../1"}, "model_version of 'm' must be an int from 0 on, got '../1'"),
        ({"inputs": X}, "inputs must be a list of TensorSpec, got TensorSpec"),
        ({"outputs": None}, "outputs must be a list of TensorSpec, got NoneType"),
        ({"max_batch_size": "4"}, "max_batch_size must be an int, got '4'"),
        ({"batcher": 5}, "batcher must be a DynamicBatcher or None, got int"),
        ({"config": {}}, "config must be a ModelConfig, got dict"),
    ],
    ids=["version", "path", "inputs", "outputs", "size", "batcher", "config"],
)
def test_an_argument_of_a_wrong_type_is_named(
    host: Host, arguments: dict[str, Any], text: str
) -> None:
    whole = {"model_name": "m", "infer_func": double, "inputs": [X], "outputs": [Y], **arguments}
    with pytest.raises(BadSpecError, match=re.escape(text)):
        host.bind(**whole)


def test_preferred_batch_sizes_must_be_a_list() -> None:
    with pytest.raises(BadSpecError, match="preferred_batch_size must be a list of sizes, got 4"):
        DynamicBatcher(preferred_batch_size=4)  # type: ignore[arg-type]  # wrong on purpose


def test_a_model_that_cannot_be_written_is_refused_and_the_others_continue(host: Host) -> None:
    with pytest.raises(HostFailure, match="cannot write model 'm'"):
        assert host._process is not None
        # No file system accepts a directory name of this length.
        host._process._request({"bind": {"name": "m"}, "version": "1" * 300})
    assert send_request(host) == [[2, 4]]


PROGRAM = """
import multiprocessing, os, resource, sys, threading, time
import numpy as np
import tritonclient.grpc as grpcclient
from host.bind import Host, HostFailure, TensorSpec

def tensors(name):
    return [TensorSpec(name=name, dtype=np.int32, shape=(1,))]

def ask(model):
    with grpcclient.InferenceServerClient(host.grpc_url) as client:
        given = grpcclient.InferInput("x", [1, 1], "INT32")
        given.set_data_from_numpy(np.array([[7]], dtype=np.int32))
        return client.infer(model, [given]).as_numpy("y").item()

def echo(requests):
    return [{"y": request["x"]} for request in requests]
"""


def run(program: str, under: Sequence[str] = ()) -> str:
    """Runs a program and returns its output; its exit status must be 0."""
    done = subprocess.run(
        [*under, sys.executable, "-c", PROGRAM + program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0
    return "".join(line for line in done.stdout.splitlines(True) if line.startswith("> "))


def test_a_fork_of_the_program_does_not_affect_the_host() -> None:
    program = """
with Host(grpc_port=0, allow_http=False, allow_metrics=False) as host:
    host.bind("echo", echo, tensors("x"), tensors("y"))
    host.run()
    child = os.fork()
    if not child:
        assert not host.is_alive()
        try:
            host.bind("late", echo, tensors("x"), tensors("y"))
        except HostFailure as failure:
            print(">", failure, flush=True)
        sys.exit()  # out of `with`, which stops no host of another process
    os.waitpid(child, 0)
    print(">", host.is_alive(), ask("echo"))
"""
    said, asked = run(program).splitlines()
    assert re.fullmatch(r"> this process is a fork; only process \d+ can use this host", said)
    assert asked == "> True 7"


def test_a_function_is_served_where_the_working_directory_is_gone(tmp_path: Path) -> None:
    program = """
from pbhost.bind import Host, TensorSpec
with Host(grpc_port=0, allow_http=False, allow_metrics=False) as host:
    host.bind("echo", echo, tensors("x"), tensors("y"))
    host.run()
    print(">", ask("echo"))
"""
    assert run(program, without_directory(tmp_path)) == "> 7\n"


@pytest.mark.unmeasured
def test_a_function_can_terminate_the_processes_that_it_forked() -> None:
    program = """
def stay(started):
    os.write(started, b"1")
    threading.Event().wait()

def work(requests):
    there, started = os.pipe()
    worker = multiprocessing.get_context("fork").Process(target=stay, args=(started,))
    worker.start()
    os.read(there, 1)
    worker.terminate()
    worker.join()
    return [{"y": np.array([[worker.exitcode]], dtype=np.int32)}]

def look():
    print(">", ask("work"))
    host.stop()

# Descriptors of high numbers: there are programs with many files.
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
with Host(grpc_port=0, allow_http=False, allow_metrics=False) as host:
    host.bind("work", work, tensors("x"), tensors("y"))
    host.run()
    threading.Timer(0, look).start()
    host.serve()
"""
    assert run(program) == "> -15\n"


def test_a_reply_that_ctrl_c_left_unread_is_not_taken_for_the_next_one() -> None:
    program = """
import signal

with Host(grpc_port=0, allow_http=False, allow_metrics=False) as host:
    host.run()
    wait = threading.Condition.wait_for
    def interrupted(*arguments):
        threading.Condition.wait_for = wait
        raise KeyboardInterrupt
    threading.Condition.wait_for = interrupted
    try:
        host.bind("first", echo, tensors("x"), tensors("y"))
    except KeyboardInterrupt:
        pass
    for name in ("second", "third"):
        host.bind(name, echo, tensors("x"), tensors("y"))
        print(">", ask(name), ask("first"))
"""
    assert run(program) == "> 7 7\n> 7 7\n"


def test_only_one_of_several_threads_starts_the_host() -> None:
    host, outcomes = new_host(), list[str]()

    def start() -> None:
        try:
            host.run()
            outcomes.append("runs")
        except HostFailure as failure:
            outcomes.append(str(failure))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert sorted(outcomes) == ["runs"] + 2 * ["this host is already started"]
    host.stop()
    with pytest.raises(HostFailure, match="this host was stopped; create a new one"):
        host.bind("double", double, [X], [Y])


def test_a_forked_child_that_returns_from_a_function_does_not_affect_the_instance() -> None:
    program = """
def work(requests):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return [{"y": np.array([[threading.get_native_id()]], dtype=np.int32)}]
    return echo(requests)

with Host(grpc_port=0, allow_http=False, allow_metrics=False) as host:
    host.bind("work", work, tensors("x"), tensors("y"))
    host.run()
    print(">", len({ask("work") for _ in range(5)}))
"""
    assert run(program) == "> 1\n"
