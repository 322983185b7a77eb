"""Stubs that die, hang, or are killed."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import numpy as np
import psutil

from tests.clients import infer_error, run_command, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, Serve, wait_until
from tests.waiting import UNTIL_SOURCE

TWO = "instance_group [ { count: 2, kind: KIND_CPU } ]"


def test_stub_death_fails_only_its_own_requests(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave", "identity")
    host = serve(repository).wait_started()
    with host.client() as client:
        status, text = infer_error(run_command, client, "aborts")
        assert status == "StatusCode.UNAVAILABLE"
        assert text.startswith("Stub process 'misbehave_0' is not healthy. It was ended by SIGABRT")
        array = np.ones(4, dtype=np.float32)
        result = client.infer("identity", [tensor("INPUT0", array)])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
        assert run_command(client, "echo back again") == "back again"
        wait_until(client.is_server_ready, "a restarted stub")
    host.wait_for("Fatal Python error: Aborted")


def test_a_crash_in_native_code_leaves_its_python_stack_in_the_log(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave")
    host = serve(repository).wait_started()
    with host.client() as client:
        _, text = infer_error(run_command, client, "segfaults")
    assert "SIGSEGV" in text
    host.wait_for(r"model\.py\".*in segfaults")


def test_a_killed_stub_is_replaced_while_its_model_is_idle(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave")
    host = serve(repository).wait_started()
    with host.client() as client:
        before = int(run_command(client, "pid"))
        os.kill(before, signal.SIGKILL)
        host.wait_for("restarted")
        assert int(run_command(client, "pid")) != before
        assert client.is_model_ready("misbehave")


def test_repeated_deaths_back_off_before_restarting(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave")
    host = serve(repository).wait_started()
    with host.client() as client:
        for _ in range(2):
            infer_error(run_command, client, "aborts")
        host.wait_for("the next one starts in 0.5 s|SIGABRT")
        infer_error(run_command, client, "aborts")
        wait_until(lambda: client.is_model_ready("misbehave"), "the model after its pause")
        assert run_command(client, "echo x") == "x"


def test_second_instance_keeps_serving_when_the_first_dies(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave")
    config = repository.path / "misbehave" / "config.pbtxt"
    config.write_text(config.read_text() + TWO)
    host = serve(repository).wait_started()
    with host.client() as client:
        infer_error(run_command, client, "aborts")
        assert client.is_model_ready("misbehave")
        assert run_command(client, "echo x") == "x"


def test_the_callers_deadline_ends_a_call_to_a_looping_model(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave", "identity")
    host = serve(
        repository,
        "--model-control-mode=explicit",
        "--load-model=*",
        "--stub-grace-secs=0.5",
    ).wait_started()
    with host.client() as client:
        for seconds in (0.5, 5, 25):  # time enough for it to get there
            status, _ = infer_error(run_command, client, "loops", client_timeout=seconds)
            assert status == "StatusCode.DEADLINE_EXCEEDED"
            if "looping" in host.output:
                break
        array = np.ones(4, dtype=np.float32)
        client.infer("identity", [tensor("INPUT0", array)])
        stub = host.stubs("misbehave_0")[0]
        client.unload_model("misbehave")
        wait_until(lambda: not stub.is_running(), "the looping stub to be ended by the unload")
        host.wait_for("successfully unloaded 'misbehave'")


def test_shutdown_ends_a_looping_model_after_the_exit_timeout(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave")
    host = serve(repository, "--exit-timeout-secs=1", "--stub-grace-secs=0.5").wait_started()
    with host.client() as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(infer_error, run_command, client, "loops")
        host.wait_for("looping")
        stub = host.stubs("misbehave_0")[0]
        assert host.stop() == 1
        assert running.result()[0] in ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED")
    wait_until(lambda: not stub.is_running(), "the looping stub to be ended")
    assert "Exit timeout expired" in host.output


def test_no_stub_outlives_a_killed_host_and_the_next_host_cleans_up(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave", "identity")
    host = serve(repository).wait_started()
    stubs = host.stubs()
    assert len(stubs) == 2
    left = set(Path(tempfile.gettempdir()).glob("pbhost-*"))
    assert left
    host.process.kill()
    host.process.wait()
    wait_until(lambda: not any(stub.is_running() for stub in stubs), "the stubs to end")
    serve(repository).wait_started()
    assert not left & set(Path(tempfile.gettempdir()).glob("pbhost-*"))


def test_a_stopped_stub_does_not_stop_the_others(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave", "identity")
    host = serve(repository, "--exit-timeout-secs=1").wait_started()
    with host.client() as client:
        pid = int(run_command(client, "pid"))
        os.kill(pid, signal.SIGSTOP)
        status, _ = infer_error(run_command, client, "echo x", client_timeout=0.5)
        assert status == "StatusCode.DEADLINE_EXCEEDED"
        client.infer("identity", [tensor("INPUT0", np.ones(2, dtype=np.float32))])
        os.kill(pid, signal.SIGCONT)
        assert run_command(client, "echo awake") == "awake"


def test_killing_stubs_under_load_answers_every_call(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """Each call ends with the right answer or UNAVAILABLE, none hangs, nothing is left behind."""
    repository.copy("identity", "misbehave")
    host = serve(repository).wait_started()
    arrays = [np.full(20_000, number, dtype=np.float32) for number in range(60)]
    begun = threading.Semaphore(0)

    def call(array: np.ndarray) -> str:
        with host.client() as client:
            begun.release()
            try:
                result = client.infer(
                    "identity", [tensor("INPUT0", array)], client_timeout=DEADLINE
                )
            except Exception as error:
                return str(error.status() if hasattr(error, "status") else error)
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
            return "answered"

    killed: set[int] = set()

    def next_one_serves() -> bool:
        with host.client() as client:
            fresh = {stub.pid for stub in host.stubs("identity_0")} - killed
            return bool(fresh) and client.is_model_ready("identity")

    with ThreadPoolExecutor(8) as pool:
        outcomes = [pool.submit(call, array) for array in arrays]
        for _ in range(3):
            for _ in range(10):
                begun.acquire(timeout=DEADLINE)
            # One that is killed while it starts is taken for one that cannot.
            wait_until(next_one_serves, "the next stub to serve")
            for stub in host.stubs("identity_0"):
                killed.add(stub.pid)
                stub.kill()
        results = [outcome.result() for outcome in outcomes]
    assert set(results) <= {"answered", "StatusCode.UNAVAILABLE"}
    assert "answered" in results  # how many depends on how soon the stubs were back
    wait_until(next_one_serves, "the model to be back")
    with host.client() as client:
        result = client.infer("identity", [tensor("INPUT0", arrays[7])], client_timeout=DEADLINE)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), arrays[7])


def test_stubs_can_be_spawned_instead_of_forked(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave", "identity")
    host = serve(repository, "--stub-start=spawn").wait_started()
    with host.client() as client:
        pid = int(run_command(client, "pid"))
        assert psutil.Process(pid).ppid() == host.process.pid
        infer_error(run_command, client, "aborts")
        assert run_command(client, "echo back") == "back"
        array = np.ones(30_000, dtype=np.float32)
        result = client.infer("identity", [tensor("INPUT0", array)])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
    assert host.stop() == 0


def test_a_dead_fork_server_is_replaced_with_all_its_stubs(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("misbehave", "identity")
    host = serve(repository).wait_started()
    with host.client() as client:
        before = psutil.Process(int(run_command(client, "pid")))
        server = before.parent()
        assert server is not None
        assert server.cmdline()[0].startswith("pbhost-fork-server")
        server.kill()
        wait_until(lambda: not before.is_running(), "the old stub to end")
        host.wait_for(r"misbehave_0\] restarted")
        assert int(run_command(client, "pid")) != before.pid
        wait_until(client.is_server_ready, "all models")
        client.infer("identity", [tensor("INPUT0", np.ones(2, dtype=np.float32))])
    assert host.stop() == 0


def test_forked_stubs_have_random_numbers_and_linear_algebra_of_their_own(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = """
    import random

    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.add_output({"name": "DRAWN", "data_type": "TYPE_FP64", "dims": [3]})
            return config

        def execute(self, requests):
            matrix = np.eye(400) * 2
            product = float((matrix @ matrix)[0, 0])
            drawn = np.array([random.random(), np.random.random(), product])
            return [pb_utils.InferenceResponse([pb_utils.Tensor("DRAWN", drawn)])]
    """
    for name in ("one", "other"):
        repository.add(name, source)
    host = serve(repository).wait_started()
    with host.client() as client:
        one, other = (client.infer(name, []).as_numpy("DRAWN") for name in ("one", "other"))
    assert one[2] == other[2] == 4
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_failed_model_serves_again_after_a_load(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    source = f"""
    import os
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            if os.path.exists({str(broken)!r}):
                raise ValueError("not this time")

        def execute(self, requests):
            os.abort()
    """
    repository.add("fragile", source)
    host = serve(repository, "--model-control-mode=explicit", "--load-model=fragile").wait_started()
    with host.client() as client:
        broken.touch()
        infer_error(client.infer, "fragile", [])
        host.wait_for("not started again")
        status, text = infer_error(client.infer, "fragile", [])
        assert status == "StatusCode.UNAVAILABLE"
        assert text.startswith("Instance 'fragile_0' died and could not be restarted: ValueError")
        assert not client.is_model_ready("fragile")
        assert not client.is_server_ready()
        broken.unlink()
        client.load_model("fragile")
        assert client.is_model_ready("fragile")


def test_a_finalize_that_kills_its_process_does_not_hold_up_the_exit(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = """
    import os
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([]) for _ in requests]

        def finalize(self):
            os.abort()
    """
    repository.add("abrupt", source)
    host = serve(repository).wait_started()
    assert host.stop() == 0
    assert (
        "finalize: Stub process 'abrupt_0' is not healthy. It was ended by SIGABRT" in host.output
    )


def test_a_stub_that_is_killed_while_it_replaces_another_is_replaced_too(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    source = f"""
    import os
    import triton_python_backend_utils as pb_utils

    def hold(where):
        def passes():
            try:
                return open({str(held)!r}).read() != where
            except FileNotFoundError:
                return True

        if not passes():
            print(f"{{where}} in {{os.getpid()}}", flush=True)
            until(passes, "the test")

    class TritonPythonModel:
        def initialize(self, args):
            hold("initialize")

        def execute(self, requests):
            hold("warm-up")
            return [pb_utils.InferenceResponse([]) for _ in requests]
    """
    config = 'model_warmup [ { name: "sample" batch_size: 1 } ]'
    repository.add("fragile", UNTIL_SOURCE + dedent(source), config)
    host = serve(repository).wait_started()

    def next_one(where: str) -> psutil.Process:
        return psutil.Process(int(host.wait_for(rf"{where} in (?!{before})(\d+)").group(1)))

    before = r"0\b"
    held.write_text("initialize")
    host.stubs("fragile_0")[0].kill()
    for where, ends in (
        ("initialize", psutil.Process.kill),
        ("initialize", lambda stub: stub.parent().kill()),  # the fork server, and so its stubs
        ("initialize", lambda stub: held.write_text("warm-up")),
        ("warm-up", psutil.Process.kill),
    ):
        stub = next_one(where)
        ends(stub)
        if held.read_text() == where:
            before += rf"|{stub.pid}\b"
    last = next_one("warm-up")
    held.unlink()
    host.wait_for("restarted")
    assert "not started again" not in host.output
    with host.client() as client:
        client.infer("fragile", [])
        assert client.is_server_ready()
    assert [stub.pid for stub in host.stubs("fragile_0")] == [last.pid]
