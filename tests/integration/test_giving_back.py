"""A server in a user's process: what it releases, and what it does not run on the event loop."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import pbhost
from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, wait_until
from tests.integration.control_models import CONFIG, JSON, model, starting
from tests.integration.test_inprocess import options
from tests.waiting import eventually

SCRIPT = """
import sys, threading
import psutil, pbhost

server = pbhost.BlockingServer(pbhost.Options(model_repository=[sys.argv[1]], allow_grpc=False,
                                          allow_http=False,
                                          exit_timeout_secs=600,
                                          metrics_port=0, metrics_address="127.0.0.1"))
try:
    server.start()
    print("started", flush=True)
    server.stop()
except KeyboardInterrupt:
    print("processes left:", psutil.Process().children(recursive=True))
    print("loops left:", [t.name for t in threading.enumerate() if t.name == "pbhost-loop"])
"""


@pytest.mark.parametrize("hanging", ["initialize", "finalize"])
def test_ctrl_c_ends_a_blocking_server_with_all_its_processes(
    repository: RepositoryBuilder, hanging: str
) -> None:
    hang = 'print("hanging", flush=True)\nthreading.Event().wait()'
    if hanging == "initialize":
        source = starting(hang)
    else:
        source = starting("pass") + "\n    def finalize(self):\n"
        source += "".join(f"        {line}\n" for line in hang.splitlines())
    repository.add("slow", source, "backend: 'python'")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(repository.path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lines.extend, args=[process.stdout])
    reader.start()
    try:
        wait_until(lambda: any("hanging" in line for line in lines), "the model to hang")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 0, lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
    assert "processes left: []\n" in lines
    assert "loops left: []\n" in lines


def mapped() -> int:
    """How many arenas of hosts this process maps."""
    return Path("/proc/self/maps").read_text().count("pbhost-host")


def test_a_stopped_server_maps_no_tensor_memory(repository: RepositoryBuilder) -> None:
    repository.copy("identity", "ask")
    array = np.arange(1_000_000, dtype=np.float32)

    async def main() -> pbhost.Server:
        async with pbhost.Server(options(repository)) as server:
            target = np.array(["identity"], dtype=np.object_)
            await server.infer("ask", {"MODEL": target, "INPUT0": array})
            assert mapped() > before
        return server

    gc.collect()
    before = mapped()
    gc.disable()  # it must not take a collection
    try:
        server = asyncio.run(main())
        assert mapped() == before
    finally:
        gc.enable()
    assert server.grpc_port


def test_disks_are_not_read_on_the_loop(repository: RepositoryBuilder) -> None:
    """A network disk that hangs must not stop requests that need no disk."""
    repository.add("x", model(), CONFIG)
    root = str(repository.path)
    read: set[int] = set()
    watching = True

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event in ("os.listdir", "os.scandir", "open"):
            if str(arguments[0]).startswith(root):
                read.add(threading.get_ident())

    async def main() -> int:
        explicit = options(repository, model_control_mode="explicit")
        async with pbhost.Server(explicit) as server:
            core = server.core
            await core.control.load_model("x", {})
            await core.control.load_model("x", {"config": JSON})
            assert [entry.state for entry in await core.repository_index(False)] == ["READY"]
        polling = options(repository, model_control_mode="poll", repository_poll_secs=1)
        async with pbhost.Server(polling) as server:
            await asyncio.to_thread(repository.add, "y", model(), CONFIG)
            lifecycle = server._open_components.lifecycle
            await eventually(
                lambda: "y" in {each.name for each in lifecycle.living_models()}, "the new model"
            )
            assert {entry.name for entry in await server.core.repository_index(True)} == {"x", "y"}
        return threading.get_ident()

    sys.addaudithook(watch)  # for good, so it is made deaf afterwards
    try:
        loop_thread = asyncio.run(main())
    finally:
        watching = False
    assert read, "the watch saw nothing"
    assert loop_thread not in read
