"""Ensembles called by clients: the order of their steps, their responses and their errors.

Orders of responses, counts and texts are those that a Triton 2.51 gives for the same ensembles of
Python models; where it differs, the test says so.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests.clients import Client, InferStream, infer_error, is_final, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.ensemble_models import (
    COUNT,
    GATHER,
    LATE,
    add_ensemble,
    add_member,
    array_of,
    infer,
    send_request,
)

CODE = """
if x is not None and x.ravel()[0] == -1:
    error = pb_utils.TritonError("minus one", pb_utils.TritonError.UNSUPPORTED)
    return pb_utils.InferenceResponse(error=error)
base = x if x is not None else y
outputs = {"A": base + 1}
if base.ravel()[0] != 7:
    outputs["B"] = (y if y is not None else base) * 2
return outputs
"""
TELL = """
facts = [request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
         json.loads(request.parameters() or "{}"), sorted(request.requested_output_names()),
         sorted(tensor.name() for tensor in request.inputs())]
(Path(__file__).parents[2] / "facts").write_text(json.dumps(facts))
parameters = json.loads(request.parameters() or "{}").get("answer")
tensors = [pb_utils.Tensor("A", x)]
return pb_utils.InferenceResponse(tensors, parameters=json.loads(parameters or "{}"))
"""
MEET = """
folder = Path(__file__).parents[2]
(folder / f"meet-{int(x[0])}").touch()
wait_for(folder / f"meet-{1 - int(x[0])}")
return {"A": x}
"""
GATE = """
folder = Path(__file__).parents[2]
if int(x[0]):
    (folder / f"started-{int(x[0])}").touch()
    end = time.monotonic() + 120
    while not (folder / f"gate-{int(x[0])}").exists() and time.monotonic() < end:
        if request.is_cancelled():
            (folder / f"cancelled-{int(x[0])}").touch()
            break
        threading.Event().wait(0.005)
return {"A": x}
"""
ASKER = """
answer = pb_utils.InferenceRequest(
    model_name="chain" if x[0] >= 0 else "selfish",
    inputs=[pb_utils.Tensor("I", x)],
    requested_output_names=["O"],
).exec()
if answer.has_error():
    return pb_utils.InferenceResponse(error=answer.error())
return {"A": pb_utils.get_output_tensor_by_name(answer, "O").as_numpy()}
"""


@pytest.fixture(scope="module")
def folder(module_repository: RepositoryBuilder) -> Path:
    return module_repository.path


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    repository = module_repository
    add_member(repository, "n", CODE)
    add_member(repository, "m", 'return {"A": x + 1}', inputs="X", outputs="A", batch=8)
    add_member(repository, "strict", 'return {"A": x + y}', inputs="X Y", outputs="A")
    add_member(repository, "tell", TELL, inputs="X", outputs="A")
    add_member(repository, "meet", MEET, inputs="X", outputs="A", count=2)
    add_member(repository, "gate", GATE, inputs="X", outputs="A", count=2)
    add_member(repository, "asker", ASKER, inputs="X", outputs="A")
    add_member(repository, "same", 'return {"A": x}', inputs="X", outputs="A")
    add_member(repository, "count", COUNT, inputs="X", outputs="A", decoupled=True)
    add_member(
        repository, "kill", "if x[0]:\n    os.kill(os.getpid(), 9)\nreturn {'A': x}",
        inputs="X", outputs="A",
    )  # fmt: skip
    add_member(
        repository, "words", 'return {"A": np.array([w + b"!" for w in x], dtype=object)}',
        inputs="X", outputs="A", kind="TYPE_STRING",
    )  # fmt: skip
    add_member(repository, "gather", GATHER, inputs="X", outputs="A")
    add_member(repository, "late", LATE, inputs="X", outputs="A", count=3)
    late = [("count", {"X": "I"}, {"A": "t"}), ("late", {"X": "t"}, {"A": "O"})]
    add_ensemble(repository, "ordered", "I", "O", late)
    add_ensemble(
        repository, "unordered", "I", "O", late,
        extra='parameters { key: "PRESERVE_ORDERING" value { string_value: "no" } }',
    )  # fmt: skip
    one = [("n", {"X": "I"}, {"A": "O"})]
    chain = [("n", {"X": "I"}, {"A": "t"}), ("n", {"X": "t"}, {"A": "O"})]
    add_ensemble(repository, "chain", "I", "O", chain)
    add_ensemble(repository, "backwards", "I", "O", chain[::-1])
    add_ensemble(
        repository, "nested", "I", "O",
        [("chain", {"I": "I"}, {"O": "t"}), ("n", {"X": "t"}, {"A": "O"})],
    )  # fmt: skip
    add_ensemble(
        repository, "diamond", "I", "O",
        [("n", {"X": "I"}, {"A": "t", "B": "u"}), ("n", {"X": "t"}, {"A": "v"}),
         ("n", {"X": "u"}, {"A": "w"}), ("strict", {"X": "v", "Y": "w"}, {"A": "O"})],
    )  # fmt: skip
    add_ensemble(
        repository, "two", "I J", "O P",
        [("n", {"X": "I"}, {"A": "O"}), ("n", {"X": "J"}, {"A": "P"})],
    )  # fmt: skip
    add_ensemble(
        repository, "opt", "I J?", "O P", [("n", {"X": "I", "Y": "J"}, {"A": "O", "B": "P"})]
    )
    add_ensemble(
        repository, "null", "I", "O",
        [("n", {"X": "I"}, {"A": "t", "B": "u"}), ("strict", {"X": "t", "Y": "u"}, {"A": "O"})],
    )  # fmt: skip
    add_ensemble(
        repository, "nothing", "I", "O",
        [("n", {"X": "I"}, {"A": "t", "B": "u"}), ("n", {"X": "t", "Y": "u"}, {"B": "O"})],
    )  # fmt: skip
    add_ensemble(
        repository, "telling", "I", "O",
        [("tell", {"X": "I"}, {"A": "t"}), ("n", {"X": "t"}, {"A": "O"})],
    )  # fmt: skip
    add_ensemble(
        repository, "told", "I", "O",
        [("tell", {"X": "I"}, {"A": "t"}), ("tell", {"X": "t"}, {"A": "O"})],
    )  # fmt: skip
    add_ensemble(
        repository, "meeting", "I J", "O P",
        [("meet", {"X": "I"}, {"A": "O"}), ("meet", {"X": "J"}, {"A": "P"})],
    )  # fmt: skip
    add_ensemble(
        repository, "unbatched", "I", "O",
        [("m", {"X": "I"}, {"A": "t"}), ("n", {"X": "t"}, {"A": "O"})],
    )  # fmt: skip
    add_ensemble(
        repository, "batched", "I", "O",
        [("n", {"X": "I"}, {"A": "t"}), ("m", {"X": "t"}, {"A": "O"})], batch=4,
    )  # fmt: skip
    add_ensemble(
        repository, "gated", "I", "O",
        [("n", {"X": "I"}, {"A": "t"}), ("gate", {"X": "t"}, {"A": "O"})],
    )  # fmt: skip
    add_ensemble(
        repository, "limited", "I", "O", [("gate", {"X": "I"}, {"A": "O"})],
        scheduling="max_inflight_requests: 1",
    )  # fmt: skip
    add_member(
        repository, "kept", 'return {"A": x + 1}', inputs="X", outputs="A",
        extra="response_cache { enable: true }",
    )  # fmt: skip
    add_ensemble(
        repository, "limited_kept", "I", "O",
        [("count", {"X": "I"}, {"A": "t"}), ("kept", {"X": "t"}, {"A": "O"})],
        scheduling="max_inflight_requests: 1",
    )  # fmt: skip
    add_ensemble(repository, "asking", "I", "O", [("asker", {"X": "I"}, {"A": "O"})])
    add_ensemble(repository, "selfish", "I", "O", [("asker", {"X": "I"}, {"A": "O"})])
    add_ensemble(repository, "killing", "I", "O", [("kill", {"X": "I"}, {"A": "O"})])
    add_ensemble(
        repository, "said", "I", "O",
        [("words", {"X": "I"}, {"A": "t"}), ("words", {"X": "t"}, {"A": "O"})],
        kind="TYPE_STRING",
    )  # fmt: skip
    add_ensemble(
        repository, "stream", "I", "O",
        [("count", {"X": "I"}, {"A": "t"}), ("n", {"X": "t"}, {"A": "O"})],
    )  # fmt: skip
    add_ensemble(repository, "same_step", "I", "O", [("same", {"X": "I"}, {"A": "O"})])
    add_ensemble(repository, "listed_twice", "I", "O O", one)
    add_ensemble(repository, "stream_listed_twice", "I", "O O", [("count", {"X": "I"}, {"A": "O"})])
    add_ensemble(repository, "without_folder", "I", "O", one).joinpath("1").rmdir()
    add_ensemble(
        repository, "both", "I", "O t",
        [("count", {"X": "I"}, {"A": "t"}), ("n", {"X": "t"}, {"A": "O"})],
    )  # fmt: skip
    add_ensemble(
        repository, "twice", "I", "O",
        [("count", {"X": "I"}, {"A": "t"}), ("count", {"X": "t"}, {"A": "O"})],
    )  # fmt: skip
    add_ensemble(repository, "cached", "I", "O", one, extra="response_cache { enable: true }")
    return module_serve(
        repository, "--cache-config=local,size=1048576", "--allow-client-shm=true"
    ).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


class ModelStream(InferStream):
    """A stream to any model."""

    def __enter__(self) -> ModelStream:
        return self

    def infer(self, model: str, value: Any, **options: Any) -> None:
        self._client.async_stream_infer(
            model,
            [tensor("I", array_of(value))],
            enable_empty_final_response=True,
            **options,
        )

    def outputs(self) -> list[dict[str, Any]]:
        """The outputs of each response that has any.

        The final flag comes with the last of them or alone after it: a step may answer before or
        after the step in front of it has ended.
        """
        return [outputs for outputs, _ in self.all() if outputs]

    def all(self) -> list[tuple[dict[str, Any], bool]]:
        """The outputs of each response up to the last one, and whether that is it."""
        found: list[tuple[dict[str, Any], bool]] = []
        while not found or not found[-1][1]:
            result = self.next()
            outputs = {
                o.name: result.as_numpy(o.name).tolist() for o in result.get_response().outputs
            }
            found.append((outputs, is_final(result)))
        return found


def counts(client: Client, model: str) -> tuple[int, int]:
    """Successes and failures of a model."""
    (found,) = client.get_inference_statistics(model).model_stats
    return found.inference_stats.success.count, found.inference_stats.fail.count


# Data flow


@pytest.mark.parametrize("length", [1, 16, 5000, 1_000_000])
@pytest.mark.parametrize("model", ["chain", "backwards"])
def test_a_tensor_goes_from_step_to_step(client: Client, model: str, length: int) -> None:
    given = np.arange(8, 8 + length, dtype=np.float32)
    result = infer(client, model, I=given)
    np.testing.assert_array_equal(result.as_numpy("O"), given + 2)


def test_an_output_that_the_configuration_lists_twice_is_returned_once(
    client: Client, host: RunningHost
) -> None:
    response = infer(client, "listed_twice", I=[1]).get_response()
    assert [output.name for output in response.outputs] == ["O"]
    with ModelStream(host) as stream:
        stream.infer("stream_listed_twice", [2])
        assert len(stream.outputs()) == 2


def test_an_ensemble_without_a_version_folder_is_version_1(client: Client) -> None:
    response = infer(client, "without_folder", I=[1]).get_response()
    assert response.model_version == "1" and client.is_model_ready("without_folder", "1")


def test_an_ensemble_is_a_step_of_another_one(client: Client) -> None:
    assert send_request(client, "nested", I=[1, 2]) == {"O": [4, 5]}


@pytest.mark.parametrize("length", [2, 500_000])
def test_branches_meet_again(client: Client, length: int) -> None:
    given = np.full(length, 3, np.float32)
    result = infer(client, "diamond", I=given)
    np.testing.assert_array_equal(result.as_numpy("O"), (given + 1 + 1) + (given * 2 + 1))


def test_independent_steps_run_at_the_same_time(client: Client) -> None:
    # Each waits for the other one.
    assert send_request(client, "meeting", I=[0], J=[1]) == {"O": [0], "P": [1]}


def test_strings_go_from_step_to_step(client: Client) -> None:
    words = np.array([b"a", b"", "ä".encode(), b"x" * 10_000], dtype=object)
    result = infer(client, "said", I=words)
    assert result.as_numpy("O").tolist() == [word + b"!!" for word in words]


def test_only_what_the_requested_outputs_need_is_run(client: Client) -> None:
    """Triton 2.51 says `unexpected deadlock` for one of the two outputs."""
    assert send_request(client, "two", outputs=["O"], I=[1], J=[-1]) == {"O": [2]}
    assert send_request(client, "two", outputs=["P"], I=[-1], J=[1]) == {"P": [2]}
    assert send_request(client, "two", outputs=["P", "O"], I=[1], J=[2]) == {"O": [2], "P": [3]}


def test_many_requests_at_once_do_not_mix(client: Client, host: RunningHost) -> None:
    def one(number: int) -> None:
        with host.client() as own:
            for turn in range(10):
                value = 100.0 * number + turn + 10
                assert send_request(own, "diamond", I=[value]) == {"O": [3 * value + 3]}

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))


# Optional and absent tensors


def test_an_optional_input_may_be_left_out(client: Client) -> None:
    assert send_request(client, "opt", I=[1], J=[5]) == {"O": [2], "P": [10]}
    assert send_request(client, "opt", I=[1]) == {"O": [2], "P": [2]}


def test_an_input_that_is_not_optional_keeps_its_steps_waiting(client: Client) -> None:
    """As many inputs came as the required ones are, so that the count is no reason to refuse."""
    assert infer_error(send_request, client, "opt", J=[5], options={"request_id": "r"}) == (
        "StatusCode.INVALID_ARGUMENT",
        (
            "in ensemble 'opt', [request id: r] unexpected deadlock, at least one output is not set"
            " while no more ensemble steps can be made"
        ),
    )


def test_an_output_that_a_member_does_not_make_is_left_out(client: Client) -> None:
    assert send_request(client, "opt", I=[7]) == {"O": [8]}
    assert send_request(client, "opt", outputs=["P"], I=[7]) == {}


def test_a_step_runs_without_an_optional_input_that_was_not_made(client: Client) -> None:
    assert send_request(client, "nothing", I=[1]) == {"O": [4]}
    assert send_request(client, "nothing", I=[7]) == {"O": [16]}


def test_a_step_that_lacks_an_input_fails(client: Client) -> None:
    assert send_request(client, "null", I=[1]) == {"O": [2 + 2]}
    status, text = infer_error(send_request, client, "null", I=[7], options={"request_id": "r"})
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert text == (
        "in ensemble 'null', [request id: r] expected 2 inputs but got 1 inputs for model 'strict'."
        " Got input(s) ['X'], but missing required input(s) ['Y']. Please provide all required"
        " input(s)."
    )


# The request options of members


def test_members_are_told_what_the_ensemble_is_told(client: Client, folder: Path) -> None:
    options = {
        "request_id": "abc", "sequence_id": 42, "sequence_start": True, "timeout": 7_000_000,
        "parameters": {"word": "v", "number": 3},
    }  # fmt: skip
    result = infer(client, "telling", I=[1], options=options)
    facts = json.loads((folder / "facts").read_text())
    assert facts == ["abc", 42, 1, 7_000_000, {"word": "v", "number": 3}, ["A"], ["X"]]
    assert result.get_response().id == "abc"


@pytest.mark.parametrize(
    ("asked", "id_", "start"), [(0, 0, False), (42, 42, True), ("name", "name", True)]
)
def test_every_response_says_its_sequence(
    client: Client, asked: int | str, id_: int | str, start: bool
) -> None:
    options = {"sequence_id": asked, "sequence_start": bool(asked)}
    parameters = infer(client, "chain", I=[1], options=options).get_response().parameters
    field = "string_param" if isinstance(id_, str) else "int64_param"
    assert getattr(parameters["sequence_id"], field) == id_
    assert parameters["sequence_start"].bool_param is start
    assert parameters["sequence_end"].bool_param is False


def test_an_output_without_elements_brings_no_sequence_parameters(client: Client) -> None:
    response = infer(client, "same_step", I=np.zeros(0, np.float32)).get_response()
    assert [list(output.shape) for output in response.outputs] == [[0]]
    assert not response.parameters
    assert "sequence_id" in infer(client, "same_step", I=[1]).get_response().parameters


def test_a_member_may_change_the_sequence_for_those_after_it(client: Client, folder: Path) -> None:
    answer = json.dumps({"sequence_id": "other", "sequence_start": False, "sequence_end": True})
    options = {"sequence_id": 5, "sequence_start": True, "parameters": {"answer": answer}}
    result = infer(client, "told", I=[1], options=options)
    facts = json.loads((folder / "facts").read_text())
    assert facts[1:3] == ["other", 2]
    parameters = result.get_response().parameters
    assert parameters["sequence_id"].string_param == "other"
    assert parameters["sequence_end"].bool_param is True


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            {"sequence_id": True},
            (
                "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or"
                " TRITONSERVER_PARAMETER_STRING"
            ),
        ),
        (
            {"sequence_start": 1},
            "expect parameter 'sequence_start' to be TRITONSERVER_PARAMETER_BOOL",
        ),
        (
            {"sequence_end": "x"},
            "expect parameter 'sequence_end' to be TRITONSERVER_PARAMETER_BOOL",
        ),
    ],
)
def test_a_sequence_of_the_wrong_type_is_refused(
    client: Client, answer: dict[str, Any], text: str
) -> None:
    options = {"parameters": {"answer": json.dumps(answer)}}
    failed = infer_error(infer, client, "telling", I=[1], options=options)
    assert failed == ("StatusCode.INVALID_ARGUMENT", f"in ensemble 'telling', {text}")


# Batches


def test_a_batch_dimension_of_one_comes_and_goes(client: Client) -> None:
    assert send_request(client, "unbatched", I=[1, 2]) == {"O": [3, 4]}
    assert send_request(client, "batched", I=[[1, 2]]) == {"O": [[3, 4]]}


def test_a_larger_batch_does_not_fit_into_a_model_without_batches(client: Client) -> None:
    assert infer_error(send_request, client, "batched", I=[[1, 2], [3, 4]]) == (
        "StatusCode.INVALID_ARGUMENT",
        (
            "in ensemble 'batched', [request id: <id_unknown>] unexpected shape for input 'X' for"
            " model 'n'. Expected [-1], got [2,2]. "
        ),
    )


def test_the_ensembles_own_limits_are_checked_first(client: Client) -> None:
    status, text = infer_error(send_request, client, "batched", I=np.zeros((5, 2), np.float32))
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert text.endswith("inference request batch-size must be <= 4 for 'batched'")


# Errors


def test_a_failure_names_the_ensembles_around_it(client: Client) -> None:
    assert infer_error(send_request, client, "nested", I=[-1]) == (
        "StatusCode.UNIMPLEMENTED",
        "in ensemble 'nested', in ensemble 'chain', minus one",
    )


def test_nothing_is_started_after_a_failure(client: Client) -> None:
    before = counts(client, "n")
    infer_error(send_request, client, "chain", I=[-1])
    assert counts(client, "n") == (before[0], before[1] + 1)


def test_a_member_that_dies_is_named_and_comes_back(client: Client) -> None:
    status, text = infer_error(send_request, client, "killing", I=[1])
    assert status == "StatusCode.UNAVAILABLE"
    assert text.startswith("in ensemble 'killing', Stub process 'kill_0_0' is not healthy.")
    wait_until(lambda: bool(client.is_model_ready("killing")), "the member to be back")
    assert send_request(client, "killing", I=[0]) == {"O": [0]}


# Statistics


def test_an_ensemble_counts_its_requests_and_the_times_of_its_members(client: Client) -> None:
    def stats(model: str) -> Any:
        (found,) = client.get_inference_statistics(model).model_stats
        return found

    before, member = stats("unbatched"), stats("m")
    send_request(client, "unbatched", I=[1])
    after, member_after = stats("unbatched"), stats("m")
    assert after.inference_count == before.inference_count + 1
    assert after.execution_count == before.execution_count + 1
    assert member_after.inference_count == member.inference_count + 1
    assert [(b.batch_size, b.compute_infer.count) for b in after.batch_stats] == [
        (1, after.execution_count)
    ]
    spent = after.inference_stats.compute_infer.ns - before.inference_stats.compute_infer.ns
    of_member = (
        member_after.inference_stats.compute_infer.ns - member.inference_stats.compute_infer.ns
    )
    assert spent > of_member > 0  # there is another member


def test_a_failure_on_the_way_counts_twice(client: Client, host: RunningHost) -> None:
    """As in Triton: its response and its end report it both."""
    before = counts(client, "two")
    infer_error(send_request, client, "two", I=[-1], J=[1])
    infer_error(send_request, client, "two", I=[1])  # refused at once: an input is missing
    assert counts(client, "two") == (before[0], before[1] + 2)


# Streams


def test_every_response_of_a_member_becomes_one_of_the_ensemble(host: RunningHost) -> None:
    with ModelStream(host) as stream:
        stream.infer("stream", [3])
        assert stream.outputs() == [{"O": [1]}, {"O": [2]}, {"O": [3]}]


def test_an_ensemble_of_streams_may_answer_nothing(host: RunningHost, client: Client) -> None:
    before = counts(client, "stream")
    with ModelStream(host) as stream:
        stream.infer("stream", [0])
        assert stream.all() == [({}, True)]
    assert counts(client, "stream") == (before[0] + 1, before[1])


def test_tensors_of_one_response_stay_together(host: RunningHost) -> None:
    with ModelStream(host) as stream:
        stream.infer("both", [3])
        found = stream.outputs()
    assert found == [{"O": [i + 1], "t": [i]} for i in range(3)]


def test_streams_may_follow_each_other(host: RunningHost) -> None:
    with ModelStream(host) as stream:
        stream.infer("twice", [4])
        found = stream.all()
    assert sorted(o["O"][0] for o, _ in found if o) == [0, 0, 0, 1, 1, 2]
    assert [final for _, final in found] == [False] * (len(found) - 1) + [True]


def test_a_long_stream_goes_through(host: RunningHost) -> None:
    """More than may be in transit from a member to the client at once."""
    with ModelStream(host) as stream:
        stream.infer("stream", [1000])
        assert [outputs["O"][0] for outputs in stream.outputs()] == list(range(1, 1001))


@pytest.mark.parametrize("ensemble", ["ordered", "unordered"])
def test_responses_keep_their_order_through_a_step_with_several_instances(
    host: RunningHost, folder: Path, ensemble: str
) -> None:
    """The first response takes longer than five others."""
    (folder / "late-5").unlink(missing_ok=True)
    with ModelStream(host) as stream:
        stream.infer(ensemble, [60])
        found = [outputs["O"][0] for outputs in stream.outputs()]
    assert (found == list(range(60))) == (ensemble == "ordered")
    assert sorted(found) == list(range(60))


def test_a_model_reads_responses_of_an_ensemble_in_order(
    host: RunningHost, client: Client, folder: Path
) -> None:
    (folder / "late-5").unlink(missing_ok=True)
    options = {"parameters": {"model": "ordered"}}
    found = send_request(client, "gather", X=[60], options=options)
    assert found["A"] == list(range(60))


def test_a_stream_ends_with_the_first_failure(host: RunningHost) -> None:
    """The step model runs to its end, however much it still sends: its responses are taken."""
    with ModelStream(host) as stream:
        stream.infer("stream", [-500])
        assert stream.next().as_numpy("O").tolist() == [6]
        with pytest.raises(InferenceServerException, match="^in ensemble 'stream', minus one$"):
            stream.next()
        stream.infer("stream", [1])
        assert stream.outputs() == [{"O": [1]}]


def test_unary_calls_are_refused_for_a_stream(client: Client) -> None:
    assert infer_error(send_request, client, "stream", I=[1]) == (
        "StatusCode.UNIMPLEMENTED",
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )


def test_the_configuration_says_whether_an_ensemble_is_a_stream(client: Client) -> None:
    for name, decoupled in (("stream", True), ("chain", False)):
        config = client.get_model_config(name).config
        assert config.HasField("model_transaction_policy")
        assert config.model_transaction_policy.decoupled is decoupled


# Cancellation and limits


def test_cancellation_reaches_the_step_that_runs(host: RunningHost, folder: Path) -> None:
    with ModelStream(host) as stream:
        stream.infer("gated", [10])
        wait_until((folder / "started-11").exists, "the second step")
        stream.cancel()
        wait_until((folder / "cancelled-11").exists, "the step to see it")


def test_no_more_requests_than_allowed_are_under_way_to_a_step(
    host: RunningHost, folder: Path
) -> None:
    done: list[int] = []
    with host.client() as client:
        first, second = threading.Event(), threading.Event()

        def start(number: int, event: threading.Event) -> None:
            def answered(result: Any, error: Any) -> None:
                done.append(number)
                event.set()

            inputs = [tensor("I", array_of([number]))]
            client.async_infer("limited", inputs, callback=answered)

        start(21, first)
        wait_until((folder / "started-21").exists, "the first request")
        start(22, second)
        # If the second one ran too, no instance would be left for this one.
        client.infer("gate", [tensor("X", array_of([0]))])
        assert not (folder / "started-22").exists()
        (folder / "gate-22").touch()
        (folder / "gate-21").touch()
        assert first.wait(DEADLINE) and second.wait(DEADLINE)
        assert done == [21, 22]


# BLS


def test_a_model_calls_an_ensemble(client: Client) -> None:
    result = client.infer("asker", [tensor("X", array_of([1]))])
    assert result.as_numpy("A").tolist() == [3]


def test_a_model_that_calls_an_ensemble_is_a_step_of_one(client: Client) -> None:
    assert send_request(client, "asking", I=[1]) == {"O": [3]}
    status, text = infer_error(send_request, client, "asking", I=[-1])
    assert text.startswith("in ensemble 'asking', ")


def test_a_step_that_calls_its_own_ensemble_fails_instead_of_waiting_forever(
    client: Client,
) -> None:
    _, text = infer_error(send_request, client, "selfish", I=[-2])
    assert text.endswith(
        "Model selfish - Error when running inference: the request waits for itself: every instance"
        " of model 'asker' is busy with a request that waits for this one. Raise the instance_group"
        " count of 'asker', or do not call 'selfish' from a model that it calls"
    )


# With other parts of the host


def test_responses_are_kept(client: Client) -> None:
    before = counts(client, "n")[0]
    assert send_request(client, "cached", I=[31]) == {"O": [32]}
    assert send_request(client, "cached", I=[31]) == {"O": [32]}
    assert counts(client, "n")[0] == before + 1
    (stats,) = client.get_inference_statistics("cached").model_stats
    assert stats.inference_stats.cache_hit.count == 1
    assert stats.inference_stats.cache_miss.count == 1


def test_a_limited_ensemble_gets_kept_responses_of_a_member(
    client: Client, host: RunningHost
) -> None:
    for _ in range(3):
        with ModelStream(host) as stream:
            stream.infer("limited_kept", [3])
            found = [outputs["O"] for outputs in stream.outputs()]
        assert found == [[1], [2], [3]]
    (stats,) = client.get_inference_statistics("kept").model_stats
    assert stats.inference_stats.cache_hit.count >= 6


def test_inputs_and_outputs_may_lie_in_the_clients_memory(client: Client) -> None:
    given = np.arange(8, 100_008, dtype=np.float32)
    size = given.nbytes
    key = f"/test-{uuid.uuid4().hex}"
    region = shm.create_shared_memory_region("ens", key, 2 * size)
    try:
        shm.set_shared_memory_region(region, [given])
        client.register_system_shared_memory("ens", key, 2 * size)
        source = grpcclient.InferInput("I", given.shape, "FP32")
        source.set_shared_memory("ens", size)
        target = grpcclient.InferRequestedOutput("O")
        target.set_shared_memory("ens", size, offset=size)
        client.infer("chain", [source], outputs=[target])
        found = shm.get_contents_as_numpy(region, np.float32, given.shape, offset=size)
        np.testing.assert_array_equal(found, given + 2)
    finally:
        client.unregister_system_shared_memory("ens")
        shm.destroy_shared_memory_region(region)


def test_the_failures_of_an_ensemble_are_counted_by_reason(
    host: RunningHost, client: Client
) -> None:
    infer_error(send_request, client, "nested", I=[-1])
    lines = host.read_metrics().splitlines()
    reasons = {
        line.split('reason="')[1].split('"')[0]: float(line.split()[-1])
        for line in lines
        if line.startswith("nv_inference_request_failure{") and 'model="nested"' in line
    }
    assert reasons["OTHER"] >= 2
    assert reasons["BACKEND"] == reasons["CANCELED"] == reasons["REJECTED"] == 0
    assert any(
        line.startswith('nv_inference_pending_request_count{model="nested"') and line.endswith(" 0")
        for line in lines
    )


PASSES_ON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(request.inputs()) for request in requests]
"""
TENSORS = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] LABELS } ]
"""


def test_classes_have_the_labels_of_the_step_model_that_makes_the_output(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    labelled = TENSORS.replace("LABELS", 'label_filename: "labels.txt"')
    repository.add(
        "member", PASSES_ON, f'backend: "python"\n{labelled}', files={"labels.txt": "cat\ndog\n"}
    )
    for name, member, tensors in (
        ("inner", "member", TENSORS.replace("LABELS", "")),
        ("outer", "inner", TENSORS.replace("LABELS", "")),
        ("own", "member", labelled),
    ):
        step = (
            f'ensemble_scheduling {{ step [ {{ model_name: "{member}" model_version: -1'
            ' input_map { key: "X" value: "X" } output_map { key: "X" value: "Y" } } ] }'
        )
        config = f'platform: "ensemble"\n{tensors}\n{step}'.replace(
            'output [ { name: "X"', 'output [ { name: "Y"'
        )
        if member == "inner":
            config = config.replace('output_map { key: "X"', 'output_map { key: "Y"')
        repository.add(name, None, config, files={"labels.txt": "eins\nzwei\n", "1/.keep": ""})
    host = serve(repository).wait_started()
    with host.client() as client:

        def classes(model: str, output: str) -> list[bytes]:
            given = tensor("X", np.array([1, 2], np.float32))
            wanted = grpcclient.InferRequestedOutput(output, class_count=2)
            return list(client.infer(model, [given], outputs=[wanted]).as_numpy(output))

        ours = [b"2.000000:1:dog", b"1.000000:0:cat"]
        assert classes("member", "X") == ours
        assert classes("inner", "Y") == ours
        assert classes("outer", "Y") == ours
        assert classes("own", "Y") == [b"2.000000:1:zwei", b"1.000000:0:eins"]
