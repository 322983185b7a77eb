"""The request that a busy stub has already: it begins with it when it has finished the other.

`pending` tells when it is there: it counts as queued until it has begun.
"""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.clients import run_command, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.test_client_memory import Memory

WAIT = """
import os
open({begun!r}, "w").close()
def gone():
    {meanwhile}
    return os.path.exists({go!r})
until(gone, "the word to continue")
return os.getpid()
"""


class Busy:
    """A model with one instance, which works on a request until it may `go` on."""

    def __init__(
        self, host: RunningHost, folder: Path, pool: ThreadPoolExecutor, meanwhile: str = "pass"
    ) -> None:
        self.host = host
        self.pool = pool
        self.begun, self.go = folder / "begun", folder / "go"
        script = WAIT.format(begun=str(self.begun), go=str(self.go), meanwhile=meanwhile)
        self.first = self.send_request(script)
        wait_until(self.begun.exists, "the first request to begin")

    def send_request(self, script: str) -> Future[Any]:
        def work() -> Any:
            with self.host.client() as client:
                return json.loads(run_command(client, script, "script", client_timeout=DEADLINE))

        return self.pool.submit(work)

    def pending(self, count: int) -> None:
        """Waits until `count` requests have arrived and not started."""

        def there() -> bool:
            with urlopen(f"http://{self.host.metrics_url}/metrics", timeout=DEADLINE) as answer:
                text = answer.read().decode()
            return bool(
                re.search(rf'pending_request_count{{model="script".*}} {count}(\.0)?$', text, re.M)
            )

        wait_until(there, f"{count} pending requests")


def test_prefetched_request_of_a_dead_stub_runs_on_its_replacement(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("script")
    host = serve(repository).wait_started()
    with host.client() as client:
        before = json.loads(run_command(client, "import os; return os.getpid()", "script"))
    with ThreadPoolExecutor(6) as pool:
        busy = Busy(host, tmp_path, pool)
        others = [busy.send_request("import os; return os.getpid()")]
        busy.pending(1)
        others += [busy.send_request("import os; return os.getpid()") for _ in range(4)]
        busy.pending(5)
        os.kill(before, signal.SIGKILL)
        with pytest.raises(InferenceServerException, match="while it ran this request"):
            busy.first.result(DEADLINE)
        after = {other.result(DEADLINE) for other in others}
    assert len(after) == 1
    assert before not in after


def test_hundred_prefetched_requests_of_a_dead_stub_run_once_each(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    """Of a quick model: the stub was sent many of them, and most it was told of together."""
    repository.copy("script")
    host = serve(repository).wait_started()
    ran = tmp_path / "ran"
    note = f"open({str(ran)!r}, 'a').write('{{}}\\n'); return {{}}"
    with ThreadPoolExecutor(101) as pool:
        with host.client() as client:
            before = json.loads(run_command(client, "import os; return os.getpid()", "script"))
        busy = Busy(host, tmp_path, pool)
        others = [busy.send_request(note.format(number, number)) for number in range(100)]
        busy.pending(100)
        os.kill(before, signal.SIGKILL)
        with pytest.raises(InferenceServerException, match="while it ran this request"):
            busy.first.result(DEADLINE)
        assert [other.result(DEADLINE) for other in others] == list(range(100))
    assert sorted(map(int, ran.read_text().split())) == list(range(100))


def test_request_in_client_memory_is_prefetched_and_survives_the_stub(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("script")
    host = serve(repository, "--allow-client-shm=true").wait_started()
    with host.client() as client, ThreadPoolExecutor(5) as pool:
        before = json.loads(run_command(client, "import os; return os.getpid()", "script"))
        text = b"import os; return os.getpid()"
        size, room = 4 + len(text), 4096
        memory = Memory(client)
        memory.write(np.frombuffer(len(text).to_bytes(4, "little") + text, np.uint8))
        busy = Busy(host, tmp_path, pool)

        def send_request(number: int) -> int:
            given = grpcclient.InferInput("COMMAND", [1], "BYTES")
            given.set_shared_memory(memory.name, size)
            wanted = grpcclient.InferRequestedOutput("ANSWER")
            wanted.set_shared_memory(memory.name, room, room * number)
            with host.client() as another:
                another.infer("script", [given], outputs=[wanted], client_timeout=DEADLINE)
            answer = memory.read(np.uint8, [room], room * number).tobytes()
            return int(answer[4 : 4 + int.from_bytes(answer[:4], "little")])

        others = [pool.submit(send_request, number) for number in range(1, 5)]
        busy.pending(4)
        os.kill(before, signal.SIGKILL)
        with pytest.raises(InferenceServerException, match="while it ran this request"):
            busy.first.result(DEADLINE)
        after = {other.result(DEADLINE) for other in others}
        client.unregister_system_shared_memory()
        memory.close()
    assert len(after) == 1
    assert before not in after


def test_prefetched_request_that_is_cancelled_does_not_run(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("script")
    model = repository.path / "script" / "1" / "model.py"
    model.write_text(model.read_text() + "\n    def is_ready(self):\n        return True\n")
    host = serve(repository).wait_started()
    ran = tmp_path / "ran"
    with ThreadPoolExecutor(3) as pool, host.client() as client:
        busy = Busy(host, tmp_path, pool)
        script = np.array([f"open({str(ran)!r}, 'w')".encode()], dtype=np.object_)
        answers: list[Any] = []
        call = client.async_infer(
            "script", [tensor("COMMAND", script)], lambda result, error: answers.append(error)
        )
        busy.pending(1)
        call.cancel()
        busy.pending(0)
        assert client.is_model_ready("script")  # answered after the cancellation was read
        last = busy.send_request("return 7")
        busy.go.touch()
        assert busy.first.result(DEADLINE)
        assert last.result(DEADLINE) == 7
        assert not ran.exists()
        wait_until(lambda: bool(answers), "the word that it is cancelled")
        assert "Cancelled" in str(answers[0]) or "CANCELLED" in str(answers[0])
        statistics = client.get_inference_statistics("script").model_stats[0]
        assert statistics.execution_count == 2
        assert statistics.inference_stats.fail.count == 1


def test_prefetched_request_may_arrive_while_execute_waits_for_bls(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("script", "identity")
    host = serve(repository).wait_started()
    meanwhile = (
        "assert not ask('identity', tensor('INPUT0', np.ones(2, np.float32))).exec().has_error()"
    )
    with ThreadPoolExecutor(8) as pool:
        busy = Busy(host, tmp_path, pool, meanwhile)
        others = [busy.send_request(f"return {number}") for number in range(6)]
        busy.pending(6)
        busy.go.touch()
        assert busy.first.result(DEADLINE)
        assert [other.result(DEADLINE) for other in others] == list(range(6))


def test_prefetched_request_runs_if_a_signal_has_ended_the_wait_for_bls(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("script")
    script = repository.path / "script"
    code, config = script / "1" / "model.py", script / "config.pbtxt"
    repository.add("other", code.read_text(), config.read_text().replace('"script"', '"other"'))
    host = serve(repository).wait_started()
    asked = tmp_path / "asked"
    waits = f"""import os
open({str(asked)!r}, 'w').close()
until(lambda: os.path.exists({str(tmp_path / "go")!r}), 'the word to continue')
"""
    meanwhile = f"""import signal
    class Ended(Exception):
        pass
    def end(*_):
        raise Ended
    signal.signal(signal.SIGUSR1, end)
    try:
        ask('other', command({waits!r})).exec()
    except Ended:
        return True"""
    with ThreadPoolExecutor(3) as pool:
        busy = Busy(host, tmp_path, pool, meanwhile)
        try:
            wait_until(asked.exists, "the other model to begin")
            other = busy.send_request("return 3")
            busy.pending(1)
            (stub,) = host.stubs("script_0")
            stub.send_signal(signal.SIGUSR1)
            assert busy.first.result(DEADLINE)
            assert other.result(DEADLINE) == 3
        finally:
            busy.go.touch()


def test_unloading_model_answers_its_prefetched_request(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.copy("script")
    host = serve(repository, "--model-control-mode=explicit", "--load-model=script")
    host.wait_started()
    with ThreadPoolExecutor(3) as pool, host.client() as client:
        busy = Busy(host, tmp_path, pool)
        other = busy.send_request("return 3")
        busy.pending(1)
        client.unload_model("script")
        busy.go.touch()
        assert busy.first.result(DEADLINE)
        assert other.result(DEADLINE) == 3


def test_bls_deadlock_is_detected_with_a_prefetched_request(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    """The prefetched request sends no BLS request, but it does not start before the cycle is
    broken.
    """
    repository.copy("script")
    host = serve(repository).wait_started()
    asked, text = tmp_path / "asked", tmp_path / "text"
    meanwhile = f"""if os.path.exists({str(asked)!r}):
        response = ask('script', command('return 1')).exec()
        open({str(text)!r}, 'w').write(response.error().message())
        return True"""
    with ThreadPoolExecutor(3) as pool:
        busy = Busy(host, tmp_path, pool, meanwhile)
        other = busy.send_request("return 3")
        busy.pending(1)
        asked.touch()
        assert busy.first.result(DEADLINE)
        assert other.result(DEADLINE) == 3
    assert "waits for itself" in text.read_text()
