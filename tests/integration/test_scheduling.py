"""Batches, priorities, queue policies and the order of responses, seen by real clients."""

from __future__ import annotations

import os
import queue
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.clients import infer_error, infer_through, run_script, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

GROUPS = """
    import os

    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        \"\"\"Says which execution it was and of whom; `NAME|PIPE` waits for a pipe.\"\"\"

        def initialize(self, args):
            self.count = 0

        def execute(self, requests):
            self.count += 1
            inputs = [pb_utils.get_input_tensor_by_name(r, "NAME").as_numpy() for r in requests]
            names = []
            for rows in inputs:
                name, _, pipe = rows.reshape(-1)[0].decode().partition("|")
                names.append(name)
                if pipe:
                    open(pipe).read()
            text = f"{self.count}:{','.join(names)}".encode()
            return [
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("GROUP", np.full((len(rows), 1), text, dtype=object))]
                )
                for rows in inputs
            ]
"""
GROUPS_CONFIG = """
    backend: "python"
    max_batch_size: {largest}
    input [ {{ name: "NAME", data_type: TYPE_STRING, dims: [ {dims} ] }} ]
    output [ {{ name: "GROUP", data_type: TYPE_STRING, dims: [ 1 ] }} ]
    dynamic_batching {{ {batching} }}
    instance_group [ {{ count: {count} }} ]
"""
HOUR = 3_600_000_000
"""In microseconds."""


def add_groups(
    repository: RepositoryBuilder,
    batching: str = "",
    *,
    largest: int = 1,
    dims: int = 1,
    count: int = 1,
    name: str = "groups",
) -> None:
    config = GROUPS_CONFIG.format(batching=batching, largest=largest, dims=dims, count=count)
    repository.add(name, GROUPS, config)


class Pipe:
    """Something that a model waits for, until the end of the block at the latest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: int | None = None
        os.mkfifo(path)

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *error: object) -> None:
        """Lets all go that wait here, as after a failed assertion, or come later."""
        waking = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        self.path.unlink()
        os.close(waking)
        self.let_go()

    def open(self) -> None:
        """Returns when the model has come to it; the model continues."""
        self.path.open("w").close()

    def reached(self) -> bool:
        """Whether a model waits here."""
        try:
            self._held = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        return True

    def let_go(self) -> None:
        """The model that has been found waiting continues."""
        held, self._held = self._held, None
        if held is not None:
            os.close(held)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    with Pipe(tmp_path / "pipe") as pipe:
        yield pipe


def rows_of(name: str, size: int = 1, width: int = 1) -> grpcclient.InferInput:
    return tensor("NAME", np.full((size, width), name.encode(), dtype=np.object_))


class Line:
    """Requests that arrive in the order of sending, and their responses in the same order."""

    def __init__(self, host: RunningHost, model: str = "groups") -> None:
        self._model = model
        self._answers: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        self.client = host.client()
        self.client.start_stream(lambda result, error: self._answers.put((result, error)))

    def send(self, name: str, size: int = 1, width: int = 1, **options: Any) -> None:
        inputs = [rows_of(name, size, width)]
        self.client.async_stream_infer(self._model, inputs, **options)

    def send_request(self, name: str, **options: Any) -> str:
        """Asks beside the line; the answer."""
        result = self.client.infer(self._model, [rows_of(name)], **options)
        answer: bytes = result.as_numpy("GROUP")[0][0]
        return answer.decode()

    def group(self) -> str:
        """The next answer: `execution:names`, or the text of the error."""
        result, error = self._answers.get(timeout=DEADLINE)
        return str(error.message()) if error else result.as_numpy("GROUP")[0][0].decode()

    def groups(self, count: int) -> list[str]:
        return [self.group() for _ in range(count)]

    def statistics(self) -> Any:
        (model,) = self.client.get_inference_statistics(self._model).model_stats
        return model

    def failures(self) -> int:
        return int(self.statistics().inference_stats.fail.count)

    def busy(self, pipe: Pipe) -> None:
        """Occupies an instance until `pipe.let_go`."""
        self.send(f"busy|{pipe.path}")
        wait_until(pipe.reached, "the model to wait")

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def hold(count: int) -> dict[str, str]:
    return {"TRITONSERVER_DELAY_SCHEDULER": str(count)}


# Batches


def test_batches_have_the_largest_preferred_size_that_can_be_reached(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    add_groups(repository, "preferred_batch_size: [ 2, 4 ]", largest=8)
    host = serve(repository, env=hold(7)).wait_started()
    with Line(host) as line:
        for name in "abcdefg":
            line.send(name)
        assert line.groups(7) == ["1:a,b,c,d"] * 4 + ["2:e,f"] * 2 + ["3:g"]


def test_a_batch_is_full_when_the_next_request_does_not_fit(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    add_groups(repository, largest=4)
    host = serve(repository, env=hold(4)).wait_started()
    with Line(host) as line:
        for name, size in (("a", 1), ("b", 2), ("c", 2), ("d", 4)):
            line.send(name, size)
        assert line.groups(4) == ["1:a,b", "1:a,b", "2:c", "3:d"]
        executions = {int(stat.batch_size) for stat in line.statistics().batch_stats}
        assert executions == {2, 3, 4}


def pending(host: RunningHost, model: str = "groups") -> int:
    """Requests that wait in the model's queue."""
    with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as answer:
        text = answer.read().decode()
    found = re.search(rf'nv_inference_pending_request_count{{model="{model}".*}} ([\d.]+)', text)
    assert found, text
    return int(float(found[1]))


def test_requests_that_came_while_the_instance_was_busy_go_together(
    repository: RepositoryBuilder, serve: Serve, pipe: Pipe
) -> None:
    add_groups(repository, largest=8)
    host = serve(repository).wait_started()
    with Line(host) as line:
        line.busy(pipe)
        for name in "abc":
            line.send(name)
        wait_until(lambda: pending(host) == 3, "all to be queued")
        pipe.let_go()
        assert line.groups(4) == ["1:busy"] + ["2:a,b,c"] * 3


def test_full_batches_and_batches_no_call_can_join_start_at_once(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    batching = f"max_queue_delay_microseconds: {HOUR}"
    add_groups(repository, batching, largest=2, dims=-1)
    host = serve(repository).wait_started()
    with Line(host) as line:
        line.send("a")
        line.send("b")
        assert line.groups(2) == ["1:a,b"] * 2
        line.send("narrow", width=1)
        line.send("wide", width=2)
        assert line.group() == "2:narrow"
        line.send("wider", width=2)
        assert line.groups(2) == ["3:wide,wider"] * 2


def test_a_batch_that_stays_alone_goes_when_its_time_is_over(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    add_groups(repository, "max_queue_delay_microseconds: 2000", largest=8)
    host = serve(repository).wait_started()
    with Line(host) as line:
        line.send("a")
        assert line.group() == "1:a"


# Priorities and queue policies


def test_higher_priorities_go_first_and_unknown_ones_are_the_default(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    add_groups(repository, "priority_levels: 3 default_priority_level: 2")
    host = serve(repository, env=hold(6)).wait_started()
    with Line(host) as line:
        for name, priority in (("a", 3), ("b", 0), ("c", 1), ("d", 4), ("e", 2), ("f", 1)):
            line.send(name, priority=priority)
        assert line.groups(6) == ["6:a", "3:b", "1:c", "4:d", "5:e", "2:f"]


def test_one_request_too_many_is_refused_at_once_and_not_counted(
    repository: RepositoryBuilder, serve: Serve, pipe: Pipe
) -> None:
    add_groups(repository, "default_queue_policy { max_queue_size: 2 }")
    host = serve(repository).wait_started()
    with Line(host) as line:
        line.busy(pipe)
        for name in "ab":
            line.send(name)
        wait_until(lambda: pending(host) == 2, "both to be queued")
        for identity, name in (("7", "7"), ("", "<id_unknown>")):
            assert infer_error(line.send_request, "c", request_id=identity) == (
                "StatusCode.UNAVAILABLE",
                f"[request id: {name}] Exceeds maximum queue size",
            )
        pipe.let_go()
        assert line.groups(3) == ["1:busy", "2:a", "3:b"]
        assert line.failures() == 0


EXPIRED = ("StatusCode.UNAVAILABLE", "Request timeout expired")


def test_a_request_is_refused_when_it_has_waited_too_long_while_the_instance_is_busy(
    repository: RepositoryBuilder, serve: Serve, pipe: Pipe
) -> None:
    add_groups(repository, "default_queue_policy { default_timeout_microseconds: 300000 }")
    host = serve(repository).wait_started()
    with Line(host) as line:
        line.busy(pipe)
        assert infer_error(line.send_request, "a") == EXPIRED
        assert line.failures() == 1
        pipe.let_go()
        assert line.group() == "1:busy"


def test_a_request_is_refused_when_it_has_waited_too_long_for_a_restart(
    repository: RepositoryBuilder, serve: Serve, pipe: Pipe, tmp_path: Path
) -> None:
    add_groups(repository, "default_queue_policy { default_timeout_microseconds: 300000 }")
    slow = GROUPS.replace(
        "self.count = 0",
        f"self.count = 0\n            if os.path.exists({str(tmp_path / 'slow')!r}):\n"
        f"                open({str(pipe.path)!r}).read()",
    )
    repository.add("groups", slow)
    host = serve(repository).wait_started()
    (tmp_path / "slow").touch()
    with Line(host) as line:
        (stub,) = host.stubs("groups_0_0")
        stub.kill()
        wait_until(pipe.reached, "the new process to initialise")
        assert infer_error(line.send_request, "a") == EXPIRED
        pipe.let_go()
        host.wait_for("restarted")
        assert line.send_request("b") == "1:b"


def test_a_request_may_shorten_its_time_where_the_policy_allows_it(
    repository: RepositoryBuilder, serve: Serve, pipe: Pipe
) -> None:
    policy = f"default_timeout_microseconds: {HOUR} allow_timeout_override: %s"
    add_groups(repository, f"default_queue_policy {{ {policy % 'true'} }}")
    add_groups(repository, f"default_queue_policy {{ {policy % 'false'} }}", name="firm")
    second = Pipe(pipe.path.with_name("second"))
    host = serve(repository).wait_started()
    with Line(host) as line, Line(host, "firm") as firm:
        line.busy(pipe)
        firm.busy(second)
        firm.send("patient", timeout=1)
        wait_until(lambda: pending(host, "firm") == 1, "it to be queued")
        line.send("patient")
        assert infer_error(line.send_request, "hasty", timeout=1) == EXPIRED
        pipe.let_go()
        second.let_go()
        assert firm.groups(2) == ["1:busy", "2:patient"]
        assert line.groups(2) == ["1:busy", "2:patient"]


def test_delayed_requests_run_after_requests_that_are_in_time(
    repository: RepositoryBuilder, serve: Serve, pipe: Pipe
) -> None:
    """When two requests have waited too long and one is refused, the other one is late too."""
    policy = f"default_timeout_microseconds: {HOUR} allow_timeout_override: true"
    add_groups(
        repository,
        "priority_levels: 2 default_priority_level: 1"
        f" default_queue_policy {{ {policy} timeout_action: DELAY }}"
        f" priority_queue_policy {{ key: 2 value {{ {policy} }} }}",
    )
    host = serve(repository).wait_started()
    with Line(host) as line:
        line.busy(pipe)
        line.send("late", timeout=1)
        wait_until(lambda: pending(host) == 1, "it to be queued")
        assert infer_error(line.send_request, "refused", priority=2, timeout=1) == EXPIRED
        line.send("punctual")
        wait_until(lambda: pending(host) == 2, "both to be queued")
        pipe.let_go()
        assert line.groups(3) == ["1:busy", "3:late", "2:punctual"]


def test_a_request_that_is_cancelled_in_the_queue_never_runs(
    repository: RepositoryBuilder, serve: Serve, pipe: Pipe
) -> None:
    add_groups(repository, largest=8)
    host = serve(repository).wait_started()
    with Line(host) as line:
        line.busy(pipe)
        answers: queue.Queue[Any] = queue.Queue()
        asked = line.client.async_infer(
            "groups", [rows_of("gone")], lambda result, error: answers.put(error)
        )
        wait_until(lambda: pending(host) == 1, "it to be queued")
        asked.cancel()
        wait_until(lambda: pending(host) == 0, "it to leave the queue")
        assert answers.get(timeout=DEADLINE).status() == "StatusCode.CANCELLED"
        line.send("next")
        wait_until(lambda: pending(host) == 1, "it to be queued")
        pipe.let_go()
        assert line.groups(2) == ["1:busy", "2:next"]
        assert line.failures() == 1


def test_bls_requests_get_the_same_errors_as_clients(
    repository: RepositoryBuilder, serve: Serve, pipe: Pipe
) -> None:
    add_groups(
        repository,
        "default_queue_policy { allow_timeout_override: true max_queue_size: 1"
        f" default_timeout_microseconds: {HOUR} }}",
    )
    repository.copy("script")
    host = serve(repository).wait_started()
    source = """
        name = tensor("NAME", np.array([[b"asked"]], dtype=object))
        response = ask("groups", name, timeout={timeout}).exec()
        error = response.error()
        return [error.code() == pb_utils.TritonError.UNAVAILABLE, error.message()]
    """
    with Line(host) as line:
        line.busy(pipe)
        assert run_script(line.client, source.format(timeout=1)) == [
            True,
            "Request timeout expired",
        ]
        line.send("a")
        wait_until(lambda: pending(host) == 1, "it to be queued")
        assert run_script(line.client, source.format(timeout=0)) == [
            False,
            (
                "Model groups - Error when running inference:"
                " [request id: <id_unknown>] Exceeds maximum queue size"
            ),
        ]
        pipe.let_go()
        assert line.groups(2) == ["1:busy", "2:a"]


def test_a_wrong_number_of_requests_to_hold_back_fails_the_load(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    add_groups(repository)
    host = serve(
        repository, "--exit-on-error=false", env={"TRITONSERVER_DELAY_SCHEDULER": "many"}
    ).wait_started()
    host.wait_for(
        "environment variable TRITONSERVER_DELAY_SCHEDULER must be a whole number of requests,"
        " got 'many'"
    )


# Ordered responses


@pytest.mark.parametrize("ordered", [True, False])
def test_responses_leave_in_the_order_of_the_requests_if_the_model_says_so(
    repository: RepositoryBuilder, serve: Serve, pipe: Pipe, ordered: bool
) -> None:
    """Two instances: the second request is done long before the first one."""
    add_groups(repository, f"preserve_ordering: {str(ordered).lower()}", count=2)
    host = serve(repository).wait_started()
    with Line(host) as line:
        answers: queue.Queue[str] = queue.Queue()

        def start(name: str) -> None:
            def answered(result: Any, error: Any) -> None:
                answers.put(name if error is None else str(error))

            line.client.async_infer("groups", [rows_of(name)], answered)

        start(f"first|{pipe.path}")
        wait_until(pipe.reached, "the model to wait")
        start("second")
        wait_until(lambda: int(line.statistics().execution_count) == 1, "the second to be run")
        if not ordered:
            assert answers.get(timeout=DEADLINE) == "second"
        pipe.let_go()
        found = [answers.get(timeout=DEADLINE).partition("|")[0] for _ in range(1 + ordered)]
        assert found == (["first", "second"] if ordered else ["first"])


def test_responses_of_a_decoupled_model_keep_the_order_too(
    repository: RepositoryBuilder, serve: Serve, pipe: Pipe
) -> None:
    model = """
        import numpy as np
        import triton_python_backend_utils as pb_utils


        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    rows = pb_utils.get_input_tensor_by_name(request, "NAME").as_numpy()
                    name, _, pipe = rows[0][0].decode().partition("|")
                    sender = request.get_response_sender()
                    for number in range(3):
                        group = np.array([[f"{name}{number}".encode()]], dtype=object)
                        sender.send(
                            pb_utils.InferenceResponse([pb_utils.Tensor("GROUP", group)])
                        )
                        if number == 1 and pipe:
                            open(pipe).read()
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    config = textwrap.dedent(
        GROUPS_CONFIG.format(largest=1, dims=1, count=2, batching="preserve_ordering: true")
    )
    repository.add("groups", model, config + "model_transaction_policy { decoupled: true }")
    host = serve(repository).wait_started()
    with Line(host) as line:
        line.send(f"a|{pipe.path}")
        wait_until(pipe.reached, "the model to wait")
        assert line.groups(2) == ["a0", "a1"]
        line.send("b")
        wait_until(lambda: int(line.statistics().execution_count) == 1, "the second to be run")
        pipe.let_go()
        assert line.groups(4) == ["a2", "b0", "b1", "b2"]


# Circles


def test_deadlock_of_ordered_responses_is_an_error(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("ask", "identity")
    config = (repository.path / "ask" / "config.pbtxt").read_text()
    (repository.path / "ask" / "config.pbtxt").write_text(
        f"{config}\ndynamic_batching {{ preserve_ordering: true }} instance_group {{ count: 2 }}\n"
    )
    host = serve(repository).wait_started()
    array = np.ones(2, dtype=np.float32)
    with host.client() as client:
        status, text = infer_error(infer_through, client, "ask>identity", array)
        assert status == "StatusCode.INTERNAL"
        assert text == (
            "Model ask - Error when running inference: the request waits for itself: model 'ask'"
            " keeps the order of its responses, and an earlier request waits for this one. Do"
            " without 'preserve_ordering', or do not call 'ask' from a model that it calls"
        )
        np.testing.assert_array_equal(infer_through(client, "identity", array), array)


ASKS_ITSELF = """
request = ask('script', command({script!r}))
response = await request.async_exec()
error = response.error()
if error is not None:
    return error.message()
answer = pb_utils.get_output_tensor_by_name(response, 'ANSWER').as_numpy()
return json.loads(answer[0])
"""


@pytest.mark.parametrize("overlap", [1, 3])
def test_coroutine_calling_its_own_busy_model_gets_an_error(
    repository: RepositoryBuilder, serve: Serve, overlap: int
) -> None:
    """Nothing says at once that the batch cannot end without the answer."""
    repository.copy("script")
    path = repository.path / "script" / "config.pbtxt"
    parameter = (
        f'parameters {{ key: "ASYNC_EXECUTE_CONCURRENCY" value {{ string_value: "{overlap}" }} }}'
    )
    path.write_text(path.read_text() + parameter)
    host = serve(repository).wait_started()
    scripts = ["return 'the innermost one'"]
    for _ in range(overlap + 1):
        scripts.append(ASKS_ITSELF.format(script=scripts[-1]))
    with host.client() as client:
        assert run_script(client, scripts[overlap - 1]) == "the innermost one"
        text = run_script(client, scripts[-1])
        assert "the request waits for itself: every instance of model 'script' is busy" in text
        assert run_script(client, "return 1") == 1


FRAGILE = """
    import os

    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            if os.path.exists({broken!r}):
                raise RuntimeError("broken")

        def execute(self, requests):
            command = pb_utils.get_input_tensor_by_name(requests[0], "COMMAND")
            if command.as_numpy()[0] == b"die":
                open({pipe!r}).read()
                os._exit(1)
            request = pb_utils.InferenceRequest(
                model_name="fragile", inputs=[command], requested_output_names=["ANSWER"]
            )
            return [request.exec()]
"""


def test_deadlock_after_an_instance_is_given_up_is_detected(
    repository: RepositoryBuilder, serve: Serve, pipe: Pipe, tmp_path: Path
) -> None:
    """As long as the other instance lives, it might answer."""
    repository.copy("misbehave")
    config = (repository.path / "misbehave" / "config.pbtxt").read_text()
    broken = tmp_path / "broken"
    model = FRAGILE.format(broken=str(broken), pipe=str(pipe.path))
    repository.add("fragile", model, config + "instance_group { count: 2 }")
    host = serve(repository).wait_started()
    with host.client() as client:
        answers: queue.Queue[str] = queue.Queue()

        def answered(result: Any, error: Any) -> None:
            answers.put(str(error.message()))

        for text in ("die", "ask"):
            array = np.array([text.encode()], dtype=np.object_)
            client.async_infer("fragile", [tensor("COMMAND", array)], answered)
            if text == "die":
                wait_until(pipe.reached, "the model to wait")
        wait_until(lambda: pending(host, "fragile") == 1, "it to be asked by itself")
        broken.touch()
        pipe.let_go()
        assert "while it ran this request" in answers.get(timeout=DEADLINE)
        assert "every instance of model 'fragile' is busy" in answers.get(timeout=DEADLINE)


def test_a_verbose_log_says_which_request_a_client_has_cancelled(
    repository: RepositoryBuilder, serve: Serve, pipe: Pipe
) -> None:
    add_groups(repository, largest=8)
    host = serve(repository, "--log-verbose=1").wait_started()
    with Line(host) as line:
        line.busy(pipe)
        asked = line.client.async_infer(
            "groups", [rows_of("gone")], lambda result, error: None, request_id="mine"
        )
        wait_until(lambda: pending(host) == 1, "it to be queued")
        asked.cancel()
        host.wait_for(
            r"\[request id: mine\] Cancellation notification received for a request to model"
            " 'groups'"
        )
        pipe.let_go()
        assert line.groups(1) == ["1:busy"]
