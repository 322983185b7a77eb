"""Models that print, log, die, block, allocate, start threads and flood without measure."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.clients import InferStream, infer_error, run_script, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.faults.campaign import REPEATS, fault
from tests.faults.models import add_models


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    """A host with a model that runs what a request says."""
    add_models(module_repository)
    return module_serve(
        module_repository,
        "--response-send-timeout-secs=2",
        "--grpc-body-timeout-secs=2",
        "--http-body-timeout-secs=2",
    ).wait_started()


BYPASS = (
    "from pb_utils import _runtime\n"
    "from stub.wire.messages import LogLine\n"
    "channel = _runtime.current()._channel\n"
)
"""The way past the limit for log lines that the stub keeps."""
SCRIPTS = {
    "prints 100,000 lines": "for n in range(100_000): print('line', n)",
    "prints 16 MB in one line": "print('a' * (16 << 20))",
    "prints what is no text": (
        "import os\nfor _ in range(1000): os.write(1, bytes(range(256)) * 16)"
    ),
    "logs 300 lines of 1 MB": ("for _ in range(300): pb_utils.Logger.log_info('a' * (1 << 20))"),
    "logs 1,500 warnings of 1 MB": (
        "for _ in range(1500): pb_utils.Logger.log_warn('a' * (1 << 20))"
    ),
    "logs 100,000 lines": "for n in range(100_000): pb_utils.Logger.log_info(f'line {n}')",
    "logs 300,000 lines of a level that is off": (
        "for n in range(300_000): pb_utils.Logger.log_verbose(f'line {n}')"
    ),
    "logs from 20 threads": (
        "def log():\n"
        " for n in range(2000): pb_utils.Logger.log_info(f'line {n}')\n"
        "threads = [threading.Thread(target=log) for _ in range(20)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]"
    ),
    "sends 200,000 log lines without their limit": BYPASS
    + "for _ in range(400): channel.send([LogLine(0, 'file.py', 1, 'a' * 20)] * 500)",
    "sends 300 log lines of 1 MB without their limit": BYPASS
    + "for _ in range(300): channel.send([LogLine(0, 'file.py', 1, 'a' * (1 << 20))])",
    "allocates 512 MB": "return len(bytearray(512 << 20))",
    "starts 200 threads": (
        "done = threading.Event()\n"
        "threads = [threading.Thread(target=done.wait) for _ in range(200)]\n"
        "[thread.start() for thread in threads]\n"
        "done.set()\n"
        "[thread.join() for thread in threads]"
    ),
    "forks 30 children": (
        "import os\n"
        "for _ in range(30):\n"
        " child = os.fork()\n"
        " if not child:\n"
        "  os._exit(0)\n"
        " os.waitpid(child, 0)"
    ),
    "computes without a pause": "return sum(range(30_000_000))",
    "opens 500 files": "files = [open('/dev/null') for _ in range(500)]",
    "asks another model 500 times": (
        "for _ in range(500):\n"
        " array = np.ones(16, np.float32)\n"
        " assert not ask('identity', tensor('INPUT0', array)).exec().has_error()"
    ),
    "asks a missing model 500 times": (
        "for _ in range(500): assert ask('missing').exec().has_error()"
    ),
    "asks from 50 threads": (
        "def run():\n"
        " for _ in range(20):\n"
        "  array = np.ones(100_000, np.float32)\n"
        "  assert not ask('identity', tensor('INPUT0', array)).exec().has_error()\n"
        "threads = [threading.Thread(target=run) for _ in range(50)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]"
    ),
    "leaves a stream of BLS unread": (
        "responses = ask('stream', command('many=5000 final')).exec(decoupled=True)\n"
        "next(iter(responses))"
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_model_harms_no_other(host: RunningHost, name: str) -> None:
    with fault(name, host), host.client() as client:
        for _ in range(REPEATS):
            run_script(client, SCRIPTS[name], client_timeout=DEADLINE)


def test_dropped_log_lines_are_counted(host: RunningHost) -> None:
    with host.client() as client:
        run_script(client, SCRIPTS["logs 100,000 lines"], client_timeout=DEADLINE)
    host.wait_for(r"script_0\] dropped \d+ log lines: an instance may log 2000 lines and 1 MiB")


def test_log_lines_past_the_limit_of_the_stub_do_not_fill_the_host(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """Half a gigabyte of them; those that the host drops are counted."""
    repository.copy("script")
    host = serve(repository).wait_started()
    line = "LogLine(0, 'file.py', 1, 'a' * (1 << 19))"
    script = f"{BYPASS}for _ in range(1000): channel.send([{line}])"
    with host.client() as client:
        assert run_script(client, "return 1") == 1
        before = most_memory(host)
        run_script(client, script, client_timeout=DEADLINE)  # the response comes after the lines
        assert most_memory(host) - before < 128 << 20
    host.wait_for(r"script_0\] dropped \d+ log lines: an instance may log 4000 lines and 2 MiB")
    assert host.stop() == 0


def most_memory(host: RunningHost) -> int:
    """The most bytes that the host has had resident."""
    status = Path(f"/proc/{host.process.pid}/status").read_text()
    return next(
        int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")
    )


STOP_READING = """
import ctypes, os, signal, sys
end, start = os.pipe()
if os.fork():
    os.dup2(start, 1)
    os.dup2(start, 2)
    os.closerange(start if start < end else end, 20)
    os.execv(sys.argv[1], sys.argv[1:])
os.close(start)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the host
lines = b""
while b"Started Metrics Service" not in lines:
    lines += (part := os.read(end, 1 << 16))
    os.write(1, part)
signal.pause()
"""
"""Runs a host and reads its console until it has started."""


@pytest.mark.parametrize(
    "script",
    ["print('a' * (4 << 20))", "for n in range(10_000): pb_utils.Logger.log_info('a' * 1000)"],
    ids=["prints", "logs"],
)
def test_a_console_that_is_not_read_harms_no_request(
    repository: RepositoryBuilder, serve: Serve, script: str
) -> None:
    """The pipe is full; `live` is served, and the model continues."""
    add_models(repository)
    host = serve(repository, under=[sys.executable, "-c", STOP_READING]).wait_started()
    with fault("the console is not read", host), host.client() as client:
        for _ in range(REPEATS):
            run_script(client, script, client_timeout=DEADLINE)
    assert host.stop() == 0


ERRORS = {
    "raises an exception of 4 MB": ("raise ValueError('a' * (4 << 20))", "ValueError"),
    "raises what is no text": ("raise ValueError('\\udc80')", "ValueError"),
    "recurses without end": ("def f(): return f()\nf()", "RecursionError"),
    "runs out of memory": ("bytearray(1 << 46)", "MemoryError"),
    "returns nothing that JSON knows": ("return object()", "not JSON serializable"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_a_model_harms_no_other(host: RunningHost, name: str) -> None:
    script, expected = ERRORS[name]
    with fault(name, host), host.client() as client:
        for _ in range(REPEATS):
            text = infer_error(run_script, client, script, client_timeout=DEADLINE)[1]
            assert expected in text


DEATHS = {
    "exits": ("import os\nos._exit(3)", "exit status 3|exited with"),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", "SIGKILL"),
    "reads memory that is not there": ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    "aborts": ("import os\nos.abort()", "SIGABRT"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_of_a_model_harms_no_other(host: RunningHost, name: str) -> None:
    """Every request that the process ran is told why it failed; the next ones are served."""
    script, expected = DEATHS[name]
    with fault(name, host), host.client() as client:
        status, text = infer_error(run_script, client, script, client_timeout=DEADLINE)
        assert status in ("StatusCode.INTERNAL", "StatusCode.UNAVAILABLE")
        assert any(word in text for word in expected.split("|")), text
        wait_until(lambda: answers(host), "the process to be replaced")


def test_a_model_that_closes_all_descriptors_harms_no_other(host: RunningHost) -> None:
    """Its response arrives only if the host needs no wake-up for it; the process is replaced."""
    (stub,) = host.stubs("script_0")
    with fault("closes its descriptors", host), host.client() as client:
        with suppress(InferenceServerException):
            script = "import os\nos.closerange(3, 1000)"
            run_script(client, script, client_timeout=DEADLINE)
        wait_until(lambda: not stub.is_running(), "the process to end")
        wait_until(lambda: answers(host), "the process to be replaced")


def answers(host: RunningHost) -> bool:
    """Whether `script` is served."""
    with host.client() as client, suppress(InferenceServerException):
        return bool(run_script(client, "return 1") == 1)
    return False


def flood_an_unread_stream(host: RunningHost) -> None:
    """A model sends 100 responses of 1 MB to a client that stops reading, and then leaves."""
    reading = threading.Event()
    leaving = threading.Event()

    def take(result: object, error: object) -> None:
        reading.set()
        leaving.wait(DEADLINE)

    with host.client() as client:
        client.start_stream(take)
        command = np.array([b"respond=1000000 " * 100 + b"final"], dtype=np.object_)
        client.async_stream_infer("stream", [tensor("COMMAND", command)])
        assert reading.wait(DEADLINE)
        leaving.set()
        client.stop_stream(cancel_requests=True)


def flood_a_reader(host: RunningHost) -> None:
    """A model sends 10,000 responses as fast as it can."""
    with InferStream(host) as stream:
        stream.send("many=10000 final", enable_empty_final_response=True)
        assert stream.read_numbers() == list(range(10_000))


FLOODS: list[Callable[[RunningHost], None]] = [flood_an_unread_stream, flood_a_reader]


@pytest.mark.parametrize("act", FLOODS, ids=lambda act: act.__name__)
def test_a_stream_of_a_model_harms_no_other(
    host: RunningHost, act: Callable[[RunningHost], None]
) -> None:
    with fault(act.__name__, host):
        for _ in range(REPEATS):
            act(host)


def test_a_model_that_blocks_harms_no_other(host: RunningHost) -> None:
    """Its process stands still for a while, with requests in its queue."""
    (stub,) = host.stubs("script_0")
    with fault("stands still", host), host.client() as client:
        for _ in range(REPEATS):
            stub.send_signal(signal.SIGSTOP)
            for _ in range(20):
                inputs = [tensor("COMMAND", np.array([b"return 1"], dtype=np.object_))]
                client.async_infer("script", inputs, lambda result, error: None)
            assert infer_error(run_script, client, "return 1", client_timeout=0.5)[0] == (
                "StatusCode.DEADLINE_EXCEEDED"
            )
            stub.send_signal(signal.SIGCONT)
            wait_until(lambda: answers(host), "the process to continue")
