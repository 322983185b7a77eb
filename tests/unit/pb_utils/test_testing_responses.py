"""The harness with models that use response senders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from pb_utils import testing
from tests.conftest import DEADLINE, wait_until

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
DECOUPLED: dict[str, Any] = {"model_transaction_policy": {"decoupled": True}}
SECOND = "Unable to send response. Non-decoupled model cannot send more than one response."


def model_of(execute: Callable[[Any], Any]) -> type[Any]:
    """Returns a model class whose ``execute`` is a function of the requests."""
    return type("Model", (), {"execute": lambda self, requests: execute(requests)})


def response(number: int) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([pb_utils.Tensor("N", np.array([number]))])


def numbers(parts: Any) -> list[int]:
    return [int(part["N"][0]) for part in parts]


def send_three_responses(requests: Any) -> None:
    """Sends 0, 1, 2 and the final flag alone to each request."""
    for request in requests:
        sender = request.get_response_sender()
        for number in range(3):
            sender.send(response(number))
        sender.send(flags=FINAL)


class TestDecoupledModels:
    def test_all_responses_are_collected(self) -> None:
        with testing.load(model_of(send_three_responses), DECOUPLED) as model:
            assert numbers(model.stream({})) == [0, 1, 2]

    def test_a_final_flag_may_come_with_the_last_response(self) -> None:
        def execute(requests: Any) -> None:
            requests[0].get_response_sender().send(response(7), FINAL)

        with testing.load(model_of(execute), DECOUPLED) as model:
            assert numbers(model.stream({})) == [7]

    def test_model_can_end_without_responses(self) -> None:
        def execute(requests: Any) -> None:
            requests[0].get_response_sender().send(flags=FINAL)

        with testing.load(model_of(execute), DECOUPLED) as model:
            assert list(model.stream({})) == []

    def test_responses_may_be_sent_by_threads_after_execute(self) -> None:
        go_on = threading.Event()

        def send(sender: Any) -> None:
            assert go_on.wait(DEADLINE)
            pb_utils.Logger.log_info("from the thread")
            sender.send(response(1), FINAL)

        def execute(requests: Any) -> None:
            sender = requests[0].get_response_sender()
            sender.send(response(0))
            threading.Thread(target=send, args=(sender,)).start()

        with testing.load(model_of(execute), DECOUPLED) as model:
            parts = model.stream({})
            assert numbers([next(parts)]) == [0]
            go_on.set()
            assert numbers(parts) == [1]
            assert [record.message for record in model.logs] == ["from the thread"]

    def test_a_model_without_auto_completed_inputs_may_complete_its_policy(self) -> None:
        class Model:
            @staticmethod
            def auto_complete_config(config: Any) -> Any:
                config.set_model_transaction_policy({"decoupled": True})
                return config

            def execute(self, requests: Any) -> None:
                send_three_responses(requests)

        with testing.load(Model) as model:
            assert numbers(model.stream({})) == [0, 1, 2]

    def test_a_batch_gives_an_iterator_for_each_request(self) -> None:
        def execute(requests: Any) -> None:
            for request in reversed(requests):
                x = request.inputs()[0].as_numpy()
                for number in x:
                    request.get_response_sender().send(response(number))
                request.get_response_sender().send(flags=FINAL)

        with testing.load(model_of(execute), DECOUPLED) as model:
            batch = [model.request({"X": [1, 2]}), model.request({"X": [3]})]
            got = [
                [int(r.output_tensors()[0].as_numpy()[0]) for r in i] for i in model.submit(batch)
            ]
        assert got == [[1, 2], [3]]

    def test_outputs_that_were_not_requested_are_dropped(self) -> None:
        with testing.load(model_of(send_three_responses), DECOUPLED) as model:
            assert list(model.stream({}, requested_outputs=["OTHER"])) == [{}, {}, {}]

    def test_an_error_response_raises_and_does_not_end_the_stream(self) -> None:
        def execute(requests: Any) -> None:
            sender = requests[0].get_response_sender()
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no")))
            sender.send(response(1), FINAL)

        with testing.load(model_of(execute), DECOUPLED) as model:
            with pytest.raises(pb_utils.TritonModelException, match="^no$"):
                next(model.stream({}))
            (iterator,) = model.submit([model.request({})])
            assert [item.has_error() for item in iterator] == [True, False]

    def test_execute_must_return_none(self) -> None:
        with testing.load(model_of(lambda requests: []), DECOUPLED, name="m") as model:
            (iterator,) = model.submit([model.request({})])
            (item,) = iterator
        error = item.error()
        assert error is not None
        assert error.message() == (
            "Failed to process the request(s) for model 'm_0', message: Python model 'm_0' is "
            "using the decoupled mode and the execute function must return None."
        )

    def test_an_exception_ends_the_open_streams_of_the_batch(self) -> None:
        refused: list[str] = []

        def execute(requests: Any) -> None:
            first, second = (request.get_response_sender() for request in requests)
            first.send(response(0), FINAL)
            second.send(response(1))
            senders.append(second)
            raise ValueError("boom")

        senders: list[Any] = []
        with testing.load(model_of(execute), DECOUPLED, name="m") as model:
            first, second = model.submit([model.request({}), model.request({})])
            assert [item.has_error() for item in first] == [False]
            item, failure = second
            assert not item.has_error()
            error = failure.error()
            assert error is not None
            assert error.message() == (
                "Failed to process the request(s) for model 'm_0', message: ValueError: boom"
            )
            try:
                senders[0].send(response(2))
            except pb_utils.TritonModelException as problem:
                refused.append(str(problem))
        assert refused == ["Unable to send response. Response sender has been closed."]
        assert model.logs[-1].level == pb_utils.Logger.ERROR
        assert "ValueError: boom" in model.logs[-1].message

    def test_model_runs_the_next_batch_after_an_exception(self) -> None:
        def execute(requests: Any) -> None:
            if not requests[0].inputs():
                raise SystemExit("leaving")
            send_three_responses(requests)

        with testing.load(model_of(execute), DECOUPLED) as model:
            with pytest.raises(pb_utils.TritonModelException, match="SystemExit: leaving"):
                list(model.stream({}))
            assert numbers(model.stream({"X": [1]})) == [0, 1, 2]

    def test_dropped_sender_ends_the_stream_with_an_error(self) -> None:
        with testing.load(model_of(lambda requests: None), DECOUPLED) as model:
            with pytest.raises(pb_utils.TritonModelException) as caught:
                list(model.stream({}))
            assert str(caught.value) == "The request at index 0 got no response."

    def test_dropped_sender_after_responses_ends_the_stream_with_an_error(self) -> None:
        def execute(requests: Any) -> None:
            requests[0].get_response_sender().send(response(0))

        with testing.load(model_of(execute), DECOUPLED) as model:
            parts = model.stream({})
            next(parts)
            with pytest.raises(pb_utils.TritonModelException) as caught:
                next(parts)
        assert str(caught.value) == (
            "The request at index 0 got a response without TRITONSERVER_RESPONSE_COMPLETE_FINAL "
            "and never completes."
        )

    def test_stream_ends_with_an_error_after_response_timeout(self) -> None:
        kept: list[Any] = []
        with testing.load(
            model_of(kept.extend), DECOUPLED, name="m", response_timeout=0.05
        ) as model:
            with pytest.raises(pb_utils.TritonModelException) as caught:
                list(model.stream({}))
        assert str(caught.value) == (
            "Model 'm' did not complete its responses within the response_timeout of 0.05 seconds."
        )

    @pytest.mark.parametrize("call", ["infer", "execute"])
    def test_unary_calls_reject_a_decoupled_model(self, call: str) -> None:
        with testing.load(model_of(send_three_responses), DECOUPLED, name="m") as model:
            argument: Any = {} if call == "infer" else [model.request({})]
            with pytest.raises(pb_utils.TritonModelException) as caught:
                getattr(model, call)(argument)
        assert str(caught.value) == (
            "Model 'm' is decoupled and may send any number of responses: use stream() or submit()."
        )

    def test_finalized_model_rejects_requests(self) -> None:
        with testing.load(model_of(send_three_responses), DECOUPLED) as model:
            pass
        with pytest.raises(pb_utils.TritonModelException, match="finalized"):
            model.stream({})
        with pytest.raises(pb_utils.TritonModelException, match="finalized"):
            model.is_ready()


class TestCoroutines:
    def test_decoupled_coroutines_overlap(self) -> None:
        class Model:
            def initialize(self, args: Any) -> None:
                self.second = threading.Event()

            async def execute(self, requests: Any) -> None:
                sender = requests[0].get_response_sender()
                if requests[0].inputs():
                    self.second.set()
                else:
                    await asyncio.to_thread(self.second.wait, DEADLINE)
                sender.send(response(0), FINAL)

        with testing.load(Model, DECOUPLED) as model:
            first = model.stream({})
            assert numbers(model.stream({"X": [1]})) == [0]
            assert numbers(first) == [0]

    def test_all_calls_share_one_loop(self) -> None:
        loops: list[asyncio.AbstractEventLoop] = []

        class Model:
            async def execute(self, requests: Any) -> Any:
                loops.append(asyncio.get_running_loop())
                return [pb_utils.InferenceResponse()]

        with testing.load(Model) as model:
            model.infer({})
            model.infer({})
            assert loops[0] is loops[1]
            assert not loops[0].is_closed()
        assert loops[0].is_closed()

    def test_an_exception_of_a_decoupled_coroutine_ends_its_streams(self) -> None:
        class Model:
            async def execute(self, requests: Any) -> None:
                requests[0].get_response_sender().send(response(0))
                raise ValueError("boom")

        with testing.load(Model, DECOUPLED, name="m") as model:
            parts = model.stream({})
            assert numbers([next(parts)]) == [0]
            with pytest.raises(pb_utils.TritonModelException) as caught:
                next(parts)
        assert str(caught.value) == (
            "Failed to process the request(s) for model 'm_0', message: ValueError: boom"
        )
        assert "Traceback" in model.logs[-1].message

    def test_coroutine_is_cancelled_after_response_timeout(self) -> None:
        class Model:
            async def execute(self, requests: Any) -> None:
                await asyncio.Event().wait()

        with testing.load(Model, name="m", response_timeout=0.05) as model:
            with pytest.raises(pb_utils.TritonModelException) as caught:
                model.infer({})
        assert str(caught.value) == "execute of m_0 has not returned within 0.05 seconds."

    def test_exception_of_a_coroutine_is_raised(self) -> None:
        class Model:
            async def execute(self, requests: Any) -> None:
                raise TimeoutError("its own")

        with testing.load(Model) as model, pytest.raises(TimeoutError, match="its own"):
            model.infer({})

    def test_an_exit_of_a_coroutine_is_raised_and_the_next_one_runs(self) -> None:
        class Model:
            async def execute(self, requests: Any) -> Any:
                if not requests[0].inputs():
                    raise SystemExit("leaving")
                return [response(1)]

        with testing.load(Model, response_timeout=2) as model:
            with pytest.raises(SystemExit, match="leaving"):
                model.infer({})
            assert numbers([model.infer({"X": [1]})]) == [1]

    def test_running_tasks_are_cancelled_at_close(self) -> None:
        cancelled = threading.Event()
        started = threading.Event()

        class Model:
            async def execute(self, requests: Any) -> None:
                started.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.set()
                    raise

        with testing.load(Model, DECOUPLED) as model:
            model.submit([model.request({})])
            assert started.wait(DEADLINE)
        assert cancelled.wait(DEADLINE)


class TestSendersOfOrdinaryModels:
    def test_a_response_may_be_sent_instead_of_returned(self) -> None:
        def execute(requests: Any) -> Any:
            requests[0].get_response_sender().send(response(0), FINAL)
            return [None, response(1)]

        with testing.load(model_of(execute)) as model:
            got = model.execute([model.request({}), model.request({})])
        assert [int(item.output_tensors()[0].as_numpy()[0]) for item in got] == [0, 1]

    def test_a_response_may_be_sent_later(self) -> None:
        def execute(requests: Any) -> None:
            sender = requests[0].get_response_sender()
            threading.Timer(0.01, sender.send, (response(5), FINAL)).start()

        with testing.load(model_of(execute)) as model:
            assert numbers([model.infer({})]) == [5]
            assert numbers(model.stream({})) == [5]

    def test_final_flag_can_follow_the_response(self) -> None:
        def execute(requests: Any) -> None:
            sender = requests[0].get_response_sender()
            sender.send(response(5))
            sender.send(flags=FINAL)

        with testing.load(model_of(execute)) as model:
            assert numbers([model.infer({})]) == [5]

    def test_sending_and_returning_a_response_is_rejected(self) -> None:
        def execute(requests: Any) -> Any:
            requests[0].get_response_sender().send(response(0), FINAL)
            return [response(1)]

        with testing.load(model_of(execute)) as model:
            with pytest.raises(pb_utils.TritonModelException) as caught:
                model.infer({})
            assert str(caught.value) == SECOND
            assert numbers(model.stream({})) == [0]  # the response that was sent before the error

    def test_a_returned_response_closes_the_sender(self) -> None:
        senders: list[Any] = []

        def execute(requests: Any) -> Any:
            senders.append(requests[0].get_response_sender())
            return [response(0)]

        with testing.load(model_of(execute)) as model:
            assert numbers([model.infer({})]) == [0]
        with pytest.raises(pb_utils.TritonModelException) as caught:
            senders[0].send(response(1))
        assert str(caught.value) == SECOND

    def test_response_without_final_flag_is_an_error(self) -> None:
        def execute(requests: Any) -> None:
            requests[0].get_response_sender().send(response(0))

        with testing.load(model_of(execute)) as model:
            with pytest.raises(pb_utils.TritonModelException, match="COMPLETE_FINAL"):
                model.infer({})

    def test_missing_late_response_is_an_error_after_response_timeout(self) -> None:
        kept: list[Any] = []
        with testing.load(model_of(kept.extend), response_timeout=0.05) as model:
            with pytest.raises(
                pb_utils.TritonModelException, match="did not complete its responses"
            ):
                model.infer({})

    def test_batch_is_cancelled_after_response_timeout(self) -> None:
        kept: list[Any] = []
        with testing.load(model_of(kept.extend), response_timeout=0.05) as model:
            with pytest.raises(pb_utils.TritonModelException, match="response_timeout of 0.05"):
                model.execute([model.request({}), model.request({})])
            wait_until(lambda: all(request.is_cancelled() for request in kept), "the cancellations")
        assert len(kept) == 2

    def test_batch_fails_if_another_one_runs_longer_than_response_timeout(self) -> None:
        go_on, started = threading.Event(), threading.Event()

        def execute(requests: Any) -> Any:
            started.set()
            assert go_on.wait(DEADLINE)
            return [response(0)]

        with testing.load(model_of(execute), name="m", response_timeout=0.2) as model:
            model.submit([model.request({})])
            assert started.wait(DEADLINE)
            with pytest.raises(pb_utils.TritonModelException) as caught:
                model.infer({})
            go_on.set()
        assert str(caught.value) == "m_0 still runs another batch after 0.2 seconds."

    def test_close_raises_if_a_batch_does_not_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pb_utils.testing._instance._MIN_STOP_SECONDS", 0.1)
        go_on, started = threading.Event(), threading.Event()

        def execute(requests: Any) -> Any:
            started.set()
            assert go_on.wait(DEADLINE)
            return [response(0)]

        model = testing.load(model_of(execute), name="m", response_timeout=0.05)
        model.submit([model.request({})])
        assert started.wait(DEADLINE)
        with pytest.raises(pb_utils.TritonModelException) as caught:
            model.close()
        assert str(caught.value) == "m_0 still runs a batch after 0.1 seconds."
        go_on.set()


class TestRescheduling:
    ITERATIVE: dict[str, Any] = {"sequence_batching": {"iterative_sequence": True}}

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_a_request_comes_again_with_a_new_sender_and_without_flags(
        self, decoupled: bool
    ) -> None:
        seen: list[tuple[int, Any]] = []

        def execute(requests: Any) -> Any:
            (request,) = requests
            x = int(request.inputs()[0].as_numpy()[0])
            seen.append((request.flags(), request.get_response_sender()))
            if len(seen) < 3:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                if decoupled:
                    request.get_response_sender().send(response(x + len(seen)))
                return None if decoupled else [None]
            if decoupled:
                request.get_response_sender().send(response(x), FINAL)
                return None
            return [response(x)]

        config = {**self.ITERATIVE, **(DECOUPLED if decoupled else {})}
        with testing.load(model_of(execute), config) as model:
            (iterator,) = model.submit([model.request({"X": [10]}, flags=3)])
            got = [int(item.output_tensors()[0].as_numpy()[0]) for item in iterator]
        assert got == ([11, 12, 10] if decoupled else [10])
        assert [flags for flags, _ in seen] == [3, 0, 0]
        assert len({id(sender) for _, sender in seen}) == 3

    def test_rescheduling_must_be_configured(self) -> None:
        def execute(requests: Any) -> Any:
            requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return [None]

        with testing.load(model_of(execute)) as model:
            with pytest.raises(pb_utils.TritonModelException, match="got no response"):
                model.infer({})
        assert model.logs[-1].message == (
            "Failed to release request: Request is released with "
            "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
            "such a flag."
        )

    def test_endless_rescheduling_ends_after_response_timeout(self) -> None:
        def execute(requests: Any) -> Any:
            requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return [None]

        with testing.load(
            model_of(execute), self.ITERATIVE, name="m", response_timeout=0.05
        ) as model:
            with pytest.raises(pb_utils.TritonModelException) as caught:
                model.infer({})
        assert str(caught.value) == "m_0 has rescheduled its requests for 0.05 seconds."


class TestCancelling:
    @pytest.mark.parametrize("dropped", [False, True])
    def test_model_sees_a_cancellation_while_it_runs(self, dropped: bool) -> None:
        ended = threading.Event()

        def execute(requests: Any) -> None:
            sender = requests[0].get_response_sender()
            sender.send(response(0))
            pause = threading.Event()
            while not (requests[0].is_cancelled() and sender.is_cancelled()):
                pause.wait(0.001)
            error = pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED)
            sender.send(pb_utils.InferenceResponse(error=error), FINAL)
            ended.set()

        with testing.load(model_of(execute), DECOUPLED) as model:
            (iterator,) = model.submit([model.request({})])
            assert not next(iterator).has_error()
            if dropped:
                del iterator
            else:
                iterator.cancel()
                error = next(iterator).error()
                assert error is not None
                assert error.code() is pb_utils.TritonError.CANCELLED
            assert ended.wait(DEADLINE)

    def test_a_request_may_be_cancelled_before_it_is_sent(self) -> None:
        def execute(requests: Any) -> Any:
            return [response(int(requests[0].is_cancelled()))]

        with testing.load(model_of(execute)) as model:
            (answer,) = model.execute([model.request({}, cancelled=True)])
        assert answer.output_tensors()[0].as_numpy().tolist() == [1]

    def test_request_can_be_passed_to_the_model_directly(self) -> None:
        def execute(requests: Any) -> None:
            sender = requests[0].get_response_sender()
            assert sender.is_cancelled()
            sender.send(response(0), FINAL)

        with testing.load(model_of(execute)) as model:
            model.model.execute([model.request({}, cancelled=True)])


class TestExpiredSequences:
    @pytest.mark.parametrize("asynchronous", [True, False])
    def test_the_model_is_told_which_sequences_have_expired(self, asynchronous: bool) -> None:
        class Model:
            def __init__(self) -> None:
                self.kept: dict[int | str, int] = {1: 1, "a": 2, 3: 3}

            def sequences_expired(self, correlation_ids: list[int | str]) -> None:
                for id in correlation_ids:
                    del self.kept[id]

        class AsyncModel(Model):
            async def sequences_expired(  # type: ignore[override]
                self, correlation_ids: list[int | str]
            ) -> None:
                await asyncio.sleep(0)
                Model.sequences_expired(self, correlation_ids)

        with testing.load(AsyncModel if asynchronous else Model) as model:
            model.sequences_expired([1, "a"])
            assert model.model.kept == {3: 3}
            with pytest.raises(KeyError):
                model.sequences_expired(["a"])
        with pytest.raises(pb_utils.TritonModelException):
            model.sequences_expired([3])

    def test_a_model_that_keeps_nothing_of_sequences_needs_no_method(self) -> None:
        with testing.load(model_of(send_three_responses)) as model:
            model.sequences_expired([1])


class TestReadiness:
    def test_model_without_is_ready_is_ready(self) -> None:
        with testing.load(model_of(send_three_responses)) as model:
            assert model.is_ready() is True

    @pytest.mark.parametrize("answer", [True, False])
    @pytest.mark.parametrize("asynchronous", [True, False])
    def test_is_ready_returns_the_models_result(self, answer: bool, asynchronous: bool) -> None:
        class Model:
            def is_ready(self) -> bool:
                return answer

        class AsyncModel:
            async def is_ready(self) -> bool:
                await asyncio.sleep(0)
                return answer

        with testing.load(AsyncModel if asynchronous else Model) as model:
            assert model.is_ready() is answer

    @pytest.mark.parametrize("answer", [1, "ready", None, np.bool_(True)])
    def test_is_ready_must_return_a_bool(self, answer: object) -> None:
        with testing.load(type("Model", (), {"is_ready": lambda self: answer})) as model:
            with pytest.raises(pb_utils.TritonModelException) as caught:
                model.is_ready()
        assert str(caught.value) == "is_ready() must return a boolean value"

    def test_exception_of_is_ready_is_raised(self) -> None:
        def is_ready(self: Any) -> bool:
            raise KeyError("not yet")

        with testing.load(type("Model", (), {"is_ready": is_ready})) as model:
            with pytest.raises(KeyError):
                model.is_ready()

    def test_is_ready_fails_after_response_timeout(self) -> None:
        class Model:
            async def is_ready(self) -> None:
                await asyncio.Event().wait()

        with testing.load(Model, name="m", response_timeout=0.05) as model:
            with pytest.raises(pb_utils.TritonModelException) as caught:
                model.is_ready()
        assert str(caught.value) == "is_ready of m_0 has not returned within 0.05 seconds."
