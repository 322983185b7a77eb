"""Sequences as clients see them: slots, controls, states, and what ends a sequence."""

from __future__ import annotations

import json
import os
import queue
import re
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.clients import infer_error, tensor
from tests.conftest import (
    DEADLINE,
    RepositoryBuilder,
    RunningHost,
    Serve,
    module_repository,
    module_serve,
    wait_until,
)

__all__ = ["module_repository", "module_serve"]

SEEN = """
    import json
    import os

    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        \"\"\"Answers with all that its batch has: for each row, the inputs by name.\"\"\"

        def initialize(self, args):
            self.executions = 0

        def execute(self, requests):
            self.executions += 1
            rows = []
            for request in requests:
                row = {"flags": request.flags(), "id": request.correlation_id()}
                for given in request.inputs():
                    value = given.as_numpy().reshape(-1)[0]
                    row[given.name()] = value.decode() if isinstance(value, bytes) else value.item()
                rows.append(row)
            answers = []
            for index, row in enumerate(rows):
                name = row.get("NAME", "")
                if name.startswith("pipe:"):
                    open(name[5:]).read()
                if name == "die":
                    os._exit(7)
                text = json.dumps({"row": index, "rows": rows, "execution": self.executions})
                seen = np.array([text.encode()], dtype=object).reshape(SHAPE)
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", seen)]))
            return answers
"""
SEEN_CONFIG = """
    backend: "python"
    max_batch_size: {largest}
    input [ {{ name: "NAME", data_type: TYPE_STRING, dims: [ 1 ] }} ]
    output [ {{ name: "SEEN", data_type: TYPE_STRING, dims: [ 1 ] }} ]
    sequence_batching {{
      max_sequence_idle_microseconds: {idle}
      control_input [
        {{ name: "START",
          control {{ kind: CONTROL_SEQUENCE_START, int32_false_true: [ -1, 1 ] }} }},
        {{ name: "END",
          control {{ kind: CONTROL_SEQUENCE_END, fp32_false_true: [ 0.5, 2.5 ] }} }},
        {{ name: "READY",
          control {{ kind: CONTROL_SEQUENCE_READY, bool_false_true: [ false, true ] }} }},
        {{ name: "ID", control {{ kind: CONTROL_SEQUENCE_CORRID, data_type: {id} }} }}
      ]
      {strategy}
    }}
    instance_group [ {{ count: {count} }} ]
"""
HOUR = 3_600_000_000
"""In microseconds."""

SUM = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            answers = []
            for request in requests:
                given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
                total = pb_utils.get_input_tensor_by_name(request, "TOTAL_IN").as_numpy()
                tensors = [pb_utils.Tensor("OUT", given + total)]
                if given[0] != 100:
                    tensors.append(pb_utils.Tensor("TOTAL_OUT", given + total))
                if given[0] == 7:
                    tensors[1] = pb_utils.Tensor("TOTAL_OUT", given.astype("float32"))
                answers.append(pb_utils.InferenceResponse(tensors))
            return answers
"""
SUM_CONFIG = """
    backend: "python"
    input [ {{ name: "IN", data_type: TYPE_INT32, dims: [ 1 ] }} ]
    output [ {{ name: "OUT", data_type: TYPE_INT32, dims: [ 1 ] }} {output} ]
    sequence_batching {{
      max_sequence_idle_microseconds: 3600000000
      state [ {{ input_name: "TOTAL_IN", output_name: "TOTAL_OUT", data_type: TYPE_INT32,
        dims: [ 1 ] {initial} }} ]
    }}
"""

EXPIRING = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        \"\"\"Keeps something of each sequence, and logs of which ones it is told.\"\"\"

        def initialize(self, args):
            self.name = args["model_instance_name"]
            self.kept = set()
            self.executing = False

        ASYNC def execute(self, requests):
            self.executing = True
            for request in requests:
                self.kept.add(request.correlation_id())
                if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
                    self.kept.discard(request.correlation_id())
            out = pb_utils.Tensor("INSTANCE", np.array([[self.name.encode()]], dtype=object))
            self.executing = False
            return [pb_utils.InferenceResponse([out]) for _ in requests]

        ASYNC def sequences_expired(self, correlation_ids):
            assert not self.executing
            for id in correlation_ids:
                self.kept.remove(id)
                pb_utils.Logger.log_info(f"{self.name} forgets {id!r}")
            if "raise" in correlation_ids:
                raise ValueError("cannot forget it")

        def finalize(self):
            pb_utils.Logger.log_info(f"{self.name} still keeps {self.kept}")
"""
EXPIRING_CONFIG = """
    backend: "python"
    max_batch_size: 4
    input [ {{ name: "NAME", data_type: TYPE_STRING, dims: [ 1 ] }} ]
    output [ {{ name: "INSTANCE", data_type: TYPE_STRING, dims: [ 1 ] }} ]
    sequence_batching {{ max_sequence_idle_microseconds: 1 {strategy} }}
    instance_group [ {{ count: 2 }} ]
"""

AGAIN = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        \"\"\"Runs each request as often as it says; answers with (round, flags) pairs.\"\"\"

        def initialize(self, args):
            self.rounds = {}

        def execute(self, requests):
            answers = []
            for request in requests:
                key = request.correlation_id()
                rounds = self.rounds.setdefault(key, [])
                rounds.append(request.flags())
                wanted = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0]
                if len(rounds) < wanted:
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                    answers.append(None)
                else:
                    out = np.array(self.rounds.pop(key), dtype=np.int32)
                    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("FLAGS", out)]))
            return answers
"""
AGAIN_DECOUPLED = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def initialize(self, args):
            self.rounds = {}

        def execute(self, requests):
            for request in requests:
                key = request.correlation_id()
                count = self.rounds[key] = self.rounds.get(key, 0) + 1
                wanted = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0]
                sender = request.get_response_sender()
                out = pb_utils.Tensor("FLAGS", np.array([count], dtype=np.int32))
                response = pb_utils.InferenceResponse([out])
                if count < wanted:
                    sender.send(response)
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                else:
                    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    del self.rounds[key]
"""
AGAIN_CONFIG = """
    backend: "python"
    input [ {{ name: "COUNT", data_type: TYPE_INT32, dims: [ 1 ] }} ]
    output [ {{ name: "FLAGS", data_type: TYPE_INT32, dims: [ -1 ] }} ]
    model_transaction_policy {{ decoupled: {decoupled} }}
    {batching}
"""


def seen_config(
    strategy: str = "direct {}",
    largest: int = 4,
    idle: int = HOUR,
    count: int = 1,
    id: str = "TYPE_UINT64",
) -> str:
    return SEEN_CONFIG.format(strategy=strategy, largest=largest, idle=idle, count=count, id=id)


def seen_model(batching: bool = True) -> str:
    return SEEN.replace("SHAPE", "1, 1" if batching else "1")


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    add = module_repository.add
    add("direct", seen_model(), seen_config())
    add("strings", seen_model(), seen_config(id="TYPE_STRING"))
    add("narrow", seen_model(), seen_config(id="TYPE_INT32"))
    add("oldest", seen_model(), seen_config("oldest { max_candidate_sequences: 4 }"))
    add("single", seen_model(False), seen_config(largest=0))
    add("mortal", seen_model(), seen_config(largest=1, count=2))
    one_each = "oldest { max_candidate_sequences: 1 }"
    add("mortal_oldest", seen_model(), seen_config(one_each, largest=1, count=2))
    add("hasty", seen_model(), seen_config(idle=1))
    for name, prefix, strategy in (
        ("expiring", "", "direct {}"),
        ("expiring_oldest", "", "oldest {}"),
        ("expiring_coroutine", "async ", "direct {}"),
    ):
        add(name, EXPIRING.replace("ASYNC ", prefix), EXPIRING_CONFIG.format(strategy=strategy))
    add("sum", SUM, SUM_CONFIG.format(output="", initial=""))
    shown = ', { name: "TOTAL_OUT", data_type: TYPE_INT32, dims: [ 1 ] }'
    initial = ', initial_state { name: "i", data_type: TYPE_INT32, dims: [ 1 ], data_file: "f" }'
    directory = add("sum_from_file", SUM, SUM_CONFIG.format(output=shown, initial=initial))
    (directory / "initial_state").mkdir()
    (directory / "initial_state" / "f").write_bytes((1000).to_bytes(4, "little"))
    growable = ", use_growable_memory: true"
    add("sum_growable", SUM, SUM_CONFIG.format(output="", initial=growable))
    for name, code, decoupled in (("again", AGAIN, "false"), ("stream", AGAIN_DECOUPLED, "true")):
        batching = "sequence_batching { iterative_sequence: true }"
        add(name, code, AGAIN_CONFIG.format(decoupled=decoupled, batching=batching))
        batching = "sequence_batching { iterative_sequence: true oldest {} }"
        add(f"{name}_oldest", code, AGAIN_CONFIG.format(decoupled=decoupled, batching=batching))
    add("not_again", AGAIN, AGAIN_CONFIG.format(decoupled="false", batching=""))
    return module_serve(module_repository).wait_started()


@pytest.fixture(scope="module")
def client(host: RunningHost) -> Iterator[grpcclient.InferenceServerClient]:
    with host.client() as client:
        yield client


def name_of(text: str, batching: bool = True) -> list[grpcclient.InferInput]:
    array = np.array([text.encode()], dtype=np.object_)
    return [tensor("NAME", array.reshape(1, 1) if batching else array)]


def send_request(
    client: grpcclient.InferenceServerClient,
    model: str,
    id: int | str,
    flags: str = "",
    text: str = "",
    **options: Any,
) -> Any:
    """Sends one request of a sequence; what the model says of its batch."""
    result = client.infer(
        model,
        name_of(text, model != "single"),
        sequence_id=id,
        sequence_start="s" in flags,
        sequence_end="e" in flags,
        **options,
    )
    return json.loads(result.as_numpy("SEEN").reshape(-1)[0])


def own_row(answer: Any) -> Any:
    return answer["rows"][answer["row"]]


@pytest.mark.parametrize("model", ["direct", "oldest", "single"])
def test_models_see_where_in_its_sequence_a_request_is(
    client: grpcclient.InferenceServerClient, model: str
) -> None:
    """The table in docs/reference/scheduling.md, "Control tensors"."""
    seen = [own_row(send_request(client, model, 77, flags)) for flags in ("s", "", "e", "se")]
    assert [(row["START"], row["END"], row["READY"], row["ID"]) for row in seen] == [
        (1, 0.5, True, 77),
        (-1, 0.5, True, 77),
        (-1, 2.5, True, 77),
        (1, 2.5, True, 77),
    ]
    assert [row["flags"] for row in seen] == [1, 0, 2, 3]
    assert {row["id"] for row in seen} == {77}


def test_rows_of_direct_batches_are_slots(client: grpcclient.InferenceServerClient) -> None:
    for number in (1, 2, 3):
        send_request(client, "direct", number, "s")
    answer = send_request(client, "direct", 3, "e", "third")
    assert answer["row"] == 2
    padding = {"flags": 0, "id": 0, "NAME": "", "START": -1, "END": 0.5, "READY": False, "ID": 0}
    assert answer["rows"][:2] == [padding, padding]
    assert send_request(client, "direct", 1, "e")["row"] == 0
    assert send_request(client, "direct", 2, "e")["row"] == 1


def test_padding_is_part_of_batches_and_of_nothing_else(
    client: grpcclient.InferenceServerClient,
) -> None:
    def counts() -> tuple[int, int, dict[int, int]]:
        (stats,) = client.get_inference_statistics("strings").model_stats
        sizes = {batch.batch_size: batch.compute_infer.count for batch in stats.batch_stats}
        return stats.inference_count, stats.inference_stats.success.count, sizes

    send_request(client, "strings", "a", "s")
    send_request(client, "strings", "b", "s")
    send_request(client, "strings", "a", "e")
    send_request(client, "strings", "b", "e")
    wait_until(lambda: counts() == (4, 4, {1: 2, 2: 2}), "the statistics")


def test_ids_may_be_strings(client: grpcclient.InferenceServerClient) -> None:
    row = own_row(send_request(client, "strings", "long word", "se"))
    assert (row["ID"], row["id"]) == ("long word", "long word")
    assert infer_error(send_request, client, "direct", "word", "se") == (
        "StatusCode.INVALID_ARGUMENT",
        (
            "[request id: <id_unknown>] sequence batching control 'ID' data-type is 'BYTES', but"
            " model 'direct' expects 'UINT64'"
        ),
    )


def test_32_bit_correlation_id_control_gets_the_low_32_bits(
    client: grpcclient.InferenceServerClient,
) -> None:
    assert own_row(send_request(client, "narrow", (1 << 40) + 5, "se"))["ID"] == 5


def test_requests_that_belong_to_no_sequence_are_refused(
    client: grpcclient.InferenceServerClient,
) -> None:
    code = "StatusCode.INVALID_ARGUMENT"
    assert infer_error(send_request, client, "direct", 0, "s") == (
        code,
        "inference request to model 'direct' must specify a non-zero or non-empty correlation ID",
    )
    assert infer_error(send_request, client, "direct", 99, "") == (
        code,
        (
            "inference request for sequence 99 to model 'direct' must specify the START flag on the"
            " first request of the sequence"
        ),
    )
    inputs = [tensor("NAME", np.full((2, 1), b"", dtype=np.object_))]
    options = {"sequence_id": 5, "sequence_start": True}
    assert infer_error(client.infer, "direct", inputs, **options) == (
        code,
        (
            "inference request to model 'direct' must specify batch-size 1 due to requirements of"
            " sequence batcher"
        ),
    )


def test_a_sequence_may_start_again(
    host: RunningHost, client: grpcclient.InferenceServerClient
) -> None:
    send_request(client, "oldest", 8, "s")
    assert own_row(send_request(client, "oldest", 8, "s"))["START"] == 1
    assert own_row(send_request(client, "oldest", 8, "e"))["END"] == 2.5
    host.wait_for("sequence 8 starts again although it has not ended")


def test_idle_sequences_are_forgotten(client: grpcclient.InferenceServerClient) -> None:
    send_request(client, "hasty", 4, "s")

    def forgotten() -> bool:
        try:
            send_request(client, "hasty", 4)
        except InferenceServerException as error:
            return "must specify the START flag" in error.message()
        return False

    wait_until(forgotten, "the end of the idle sequence")


@pytest.mark.parametrize("model", ["expiring", "expiring_oldest", "expiring_coroutine"])
def test_the_instance_of_a_sequence_that_was_idle_for_too_long_is_told(
    host: RunningHost, client: grpcclient.InferenceServerClient, model: str
) -> None:
    def start(id: int | str, end: bool = False) -> str:
        result = client.infer(
            model, name_of(""), sequence_id=id, sequence_start=True, sequence_end=end
        )
        name: bytes = result.as_numpy("INSTANCE")[0, 0]
        return name.decode()

    start(5, end=True)
    for id in ("text", 2**63 - 1, "7", 7):
        host.wait_for(f"{start(id)} forgets {id!r}")
    host.wait_for(f"{start('raise')} forgets 'raise'")
    host.wait_for(f"{model}.*sequences_expired failed: ValueError: cannot forget it")
    host.wait_for(f"{start(8)} forgets 8")
    told = re.findall(rf"{model}_0_\d forgets (.*)", host.output)
    assert told == ["'text'", str(2**63 - 1), "'7'", "7", "'raise'", "8"]


class Line:
    """One stream, with responses in order of arrival."""

    def __init__(self, host: RunningHost, model: str) -> None:
        self.answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._model = model
        self.client = host.client()
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))

    def send(self, id: int, flags: str = "", text: str = "", **options: Any) -> None:
        self.client.async_stream_infer(
            self._model,
            name_of(text),
            sequence_id=id,
            sequence_start="s" in flags,
            sequence_end="e" in flags,
            **options,
        )

    def next(self) -> Any:
        result, error = self.answers.get(timeout=DEADLINE)
        if error is not None:
            return error.message()
        return json.loads(result.as_numpy("SEEN").reshape(-1)[0])

    def close(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def pending(host: RunningHost, model: str) -> int:
    for line in host.read_metrics().splitlines():
        if line.startswith("nv_inference_pending_request_count") and f'"{model}"' in line:
            return int(float(line.rsplit(" ", 1)[1]))
    return -1


@pytest.mark.parametrize("model", ["mortal", "mortal_oldest"])
def test_a_dead_stub_ends_its_sequences_and_no_others(
    host: RunningHost, client: grpcclient.InferenceServerClient, model: str
) -> None:
    send_request(client, model, 1, "s")
    send_request(client, model, 2, "s")
    line = Line(host, model)
    line.send(3, "se", "behind")  # the backlog
    wait_until(lambda: pending(host, model) == 1, "the backlog")
    _, text = infer_error(send_request, client, model, 1, "", "die")
    assert "is not healthy" in text
    assert "must specify the START flag" in infer_error(send_request, client, model, 1)[1]
    assert own_row(line.next())["id"] == 3  # it gets the slot of the new instance
    assert own_row(send_request(client, model, 2, "e"))["id"] == 2
    line.close()


def test_sequences_in_the_backlog_have_a_time_limit(
    host: RunningHost, client: grpcclient.InferenceServerClient
) -> None:
    wait_until(lambda: len(host.stubs("mortal_0_0")) == 1, "the new instance")
    send_request(client, "mortal", 11, "s")
    send_request(client, "mortal", 12, "s")
    line = Line(host, "mortal")
    late = "timeout of the corresponding sequence has been expired"
    timeout = 1_000_000  # microseconds
    answers: list[Any] = []
    while answers != [late, late] and timeout < DEADLINE * 1e6:
        line.send(13, "s", timeout=timeout)
        line.send(13)  # may arrive too late for a short timeout
        answers = [line.next() for _ in range(2)]
        timeout *= 4
    assert answers == [late, late]
    send_request(client, "mortal", 11, "e")
    send_request(client, "mortal", 12, "e")
    line.close()


def test_sequence_leaving_the_backlog_makes_room_for_others(
    host: RunningHost, client: grpcclient.InferenceServerClient
) -> None:
    send_request(client, "mortal", 21, "s")
    send_request(client, "mortal", 22, "s")
    leaving = Line(host, "mortal")
    leaving.send(23, "s")
    wait_until(lambda: pending(host, "mortal") == 1, "the backlog")
    leaving.close()
    wait_until(lambda: pending(host, "mortal") == 0, "the cancelled request to be gone")
    line = Line(host, "mortal")
    line.send(24, "se")
    send_request(client, "mortal", 21, "e")
    assert own_row(line.next())["id"] == 24
    send_request(client, "mortal", 22, "e")
    line.close()


def add_up(
    client: grpcclient.InferenceServerClient,
    model: str,
    value: int,
    flags: str = "",
    outputs: tuple[str, ...] = (),
) -> Any:
    return client.infer(
        model,
        [tensor("IN", np.array([value], dtype=np.int32))],
        sequence_id=1,
        sequence_start="s" in flags,
        sequence_end="e" in flags,
        outputs=[grpcclient.InferRequestedOutput(name) for name in outputs] or None,
    )


def test_states_go_from_request_to_request(client: grpcclient.InferenceServerClient) -> None:
    """Beyond Triton, where Python models cannot return states."""
    steps = [(1, "s"), (2, ""), (100, ""), (3, ""), (5, "s"), (1, "e")]
    totals = [add_up(client, "sum", value, flags) for value, flags in steps]
    assert [int(total.as_numpy("OUT")[0]) for total in totals] == [1, 3, 103, 6, 5, 6]
    assert all(total.as_numpy("TOTAL_OUT") is None for total in totals)


def test_states_can_start_from_a_file_and_be_seen(
    client: grpcclient.InferenceServerClient,
) -> None:
    both = add_up(client, "sum_from_file", 1, "s")
    assert (both.as_numpy("OUT")[0], both.as_numpy("TOTAL_OUT")[0]) == (1001, 1001)
    one = add_up(client, "sum_from_file", 1, "e", ("OUT",))
    assert one.as_numpy("OUT")[0] == 1002
    assert one.as_numpy("TOTAL_OUT") is None


def test_states_that_are_not_outputs_cannot_be_requested(
    client: grpcclient.InferenceServerClient,
) -> None:
    assert infer_error(add_up, client, "sum", 1, "se", ("TOTAL_OUT",)) == (
        "StatusCode.INVALID_ARGUMENT",
        "unexpected inference output 'TOTAL_OUT' for model 'sum'",
    )


def test_a_state_of_another_type_is_an_error(client: grpcclient.InferenceServerClient) -> None:
    assert infer_error(add_up, client, "sum", 7, "se")[1] == (
        "state output 'TOTAL_OUT' has data-type 'FP32', but its configuration in"
        " 'sequence_batching' expects 'INT32'"
    )


def test_memory_that_grows_is_for_gpus(
    host: RunningHost, client: grpcclient.InferenceServerClient
) -> None:
    with pytest.raises(InferenceServerException):  # the model lacks its state
        add_up(client, "sum_growable", 1, "se")
    host.wait_for(
        "Failed to initialize sequence state: In order to 'use_growable_memory', you must also"
        " enable 'use_single_buffer' for state input name 'TOTAL_IN'."
    )


def count_of(value: int) -> list[grpcclient.InferInput]:
    return [tensor("COUNT", np.array([value], dtype=np.int32))]


@pytest.mark.parametrize("model", ["again", "again_oldest"])
def test_requests_can_be_run_again(client: grpcclient.InferenceServerClient, model: str) -> None:
    for _ in range(3):  # each has a slot for as long as it takes
        assert client.infer(model, count_of(4)).as_numpy("FLAGS").tolist() == [1, 0, 0, 0]
    assert client.infer(model, count_of(1), sequence_id=5, sequence_start=True).as_numpy(
        "FLAGS"
    ).tolist() == [1]
    assert (
        "must specify the START flag"
        in infer_error(client.infer, model, count_of(1), sequence_id=5)[1]
    )
    (counts,) = client.get_inference_statistics(model).model_stats
    assert counts.inference_stats.fail.count == 0, "that slots are given up is no failure"


def test_requests_with_an_end_cannot_be_run_again(
    client: grpcclient.InferenceServerClient,
) -> None:
    options = {"sequence_id": 6, "sequence_start": True, "sequence_end": True}
    assert (
        "must specify the START flag"
        in infer_error(client.infer, "again", count_of(2), **options)[1]
    )


@pytest.mark.parametrize("model", ["again", "again_oldest"])
def test_requests_without_id_have_the_start_flag_alone(host: RunningHost, model: str) -> None:
    inputs = [{"name": "COUNT", "datatype": "INT32", "shape": [1], "data": [3]}]
    body = json.dumps({"parameters": {"sequence_end": True}, "inputs": inputs}).encode()
    url = f"http://{host.http_url}/v2/models/{model}/infer"
    with urllib.request.urlopen(url, body, DEADLINE) as answer:
        (output,) = json.load(answer)["outputs"]
    assert output["data"] == [1, 0, 0]


@pytest.mark.parametrize("model", ["stream", "stream_oldest"])
def test_streams_can_be_made_of_many_executions(host: RunningHost, model: str) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with host.client() as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, count_of(5))
        got = [answers.get(timeout=DEADLINE) for _ in range(5)]
        assert [error for _, error in got if error] == []
        assert [int(result.as_numpy("FLAGS")[0]) for result, _ in got] == [1, 2, 3, 4, 5]
        client.stop_stream()


def test_other_models_cannot_have_requests_run_again(
    client: grpcclient.InferenceServerClient,
) -> None:
    assert infer_error(client.infer, "not_again", count_of(2))[1] == (
        "Failed to release request: Request is released with"
        " TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle"
        " such a flag."
    )


def test_unloading_waits_for_the_requests_of_sequences(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    repository.add("direct", seen_model(), seen_config())
    host = serve(repository, "--model-control-mode=explicit", "--load-model=direct")
    host.wait_started()
    line = Line(host, "direct")
    line.send(1, "s", f"pipe:{pipe}")
    line.send(1, "e")
    wait_until(lambda: pending(host, "direct") == 1, "the second request to wait")
    with host.client() as client:
        client.unload_model("direct")
    pipe.open("w").close()
    assert [own_row(line.next())["flags"] for _ in range(2)] == [1, 2]
    line.close()


@pytest.mark.parametrize("strategy", ["direct {}", "oldest { max_candidate_sequences: 4 }"])
def test_a_sequence_between_requests_ends_with_its_model(
    serve: Serve, repository: RepositoryBuilder, strategy: str
) -> None:
    repository.add("m", seen_model(), seen_config(strategy))
    host = serve(repository, "--model-control-mode=explicit", "--load-model=m").wait_started()
    with host.client() as client:
        send_request(client, "m", 1, "s")
        client.unload_model("m")
        wait_until(lambda: not client.is_model_ready("m"), "the model to go")
        client.load_model("m")
        assert "must specify the START flag" in infer_error(send_request, client, "m", 1)[1]
        send_request(client, "m", 1, "s")
        (repository.path / "m" / "1" / "model.py").touch()
        client.load_model("m")
        assert "must specify the START flag" in infer_error(send_request, client, "m", 1)[1]
        send_request(client, "m", 1, "se")


@pytest.mark.parametrize("strategy", ["direct {}", "oldest { max_candidate_sequences: 4 }"])
def test_an_exit_waits_for_open_sequences_and_reports_them_at_once(
    serve: Serve, repository: RepositoryBuilder, strategy: str
) -> None:
    repository.add("idles", seen_model(), seen_config(strategy, idle=1_500_000))
    repository.add("stays", seen_model(), seen_config(strategy))
    host = serve(repository, "--exit-timeout-secs=60").wait_started()
    with host.client() as client:
        for number in (1, 2):
            send_request(client, "idles", number, "s")
        send_request(client, "stays", 1, "s")
        send_request(client, "stays", 1, "e")
        send_request(client, "stays", 2, "se")
    assert host.stop() == 0
    start = host.output.index("Waiting for in-flight requests to complete.")
    reports = [line.split("] ", 1)[1] for line in host.output[start:].splitlines() if "] " in line]
    assert re.fullmatch(
        r"Timeout [0-9]+: Found 1 model versions that have in-flight inferences", reports[0]
    )
    assert reports[1] == "Model 'idles' (version 1) has 2 in-flight inferences"


def test_an_exit_ends_sequences_that_exceed_its_timeout(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    repository.add("stays", seen_model(), seen_config())
    host = serve(repository, "--exit-timeout-secs=1").wait_started()
    with host.client() as client:
        send_request(client, "stays", 1, "s")
    assert host.stop() == 1
    assert "Exit timeout expired. Exiting immediately." in host.output


def limited_config(strategy: str, count: int) -> str:
    """A configuration whose instances all need the same resource, of which only one exists."""
    wanted = f'count: {count} rate_limiter {{ resources [ {{ name: "R", count: 1 }} ] }}'
    return seen_config(strategy, largest=1, count=count).replace(f"count: {count}", wanted)


def is_alone(host: RunningHost, model: str) -> bool:
    return len(host.stubs(f"{model}_0_0") + host.stubs(f"{model}_0_1")) == 1


def test_instances_that_are_too_many_keep_their_sequences_to_the_end(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    strategies = {"direct": "direct {}", "oldest": "oldest { max_candidate_sequences: 1 }"}
    for model, strategy in strategies.items():
        repository.add(model, seen_model(), limited_config(strategy, 2))
    flags = ("--model-control-mode=explicit", "--load-model=*", "--rate-limit=execution_count")
    host = serve(repository, *flags).wait_started()
    with host.client() as client:
        for model, strategy in strategies.items():
            assert [send_request(client, model, id, "s")["execution"] for id in (1, 2)] == [1, 1]
            repository.add(model, config=limited_config(strategy, 1))
            client.load_model(model)
            line = Line(host, model)
            line.send(3, "se")  # it gets the slot of the instance that stays
            executions = [
                send_request(client, model, id, end)["execution"] for end in " e" for id in (1, 2)
            ]
            assert sorted(executions) == [2, 2, 3, 3]
            assert own_row(line.next())["id"] == 3
            wait_until(partial(is_alone, host, model), "the end of the other instance")
            line.close()
