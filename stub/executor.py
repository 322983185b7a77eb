"""One batch: requests in, the model's `execute`, its return value checked, responses out."""

import time
from typing import Any, List, Optional, Sequence

import pb_utils
from stub.convert import failed, request_from, response_to
from stub.memory import Memory
from stub.user_model import UserModel, describe_exception
from stub.wire.arena import Block
from stub.wire.messages import BatchDone, Execute, Respond, ToHost, WireResponse


class BadReturn(Exception):
    """`execute` returned something that cannot be sent."""


def check_return(responses: Any, count: int) -> List[Optional[pb_utils.InferenceResponse]]:
    """What `execute` returned for `count` requests. Raises BadReturn (pb_utils spec 2.4)."""
    if responses is None:
        return [None] * count
    if not isinstance(responses, list):
        raise BadReturn(f"Expected a list in the execute return, found type '{type(responses)}'.")
    if len(responses) != count:
        raise BadReturn(
            "Number of InferenceResponse objects do not match the number of InferenceRequest"
            f" objects. InferenceRequest(s) size is:{count}, and InferenceResponse(s) size"
            f" is:{len(responses)}\n"
        )
    for response in responses:
        if response is not None and not isinstance(response, pb_utils.InferenceResponse):
            raise BadReturn(
                "Expected an 'InferenceResponse' object in the execute function return list,"
                f" found type '{type(response)}'."
            )
    return responses


class Executor:
    """Runs batches of one instance, on the main thread."""

    def __init__(
        self, model: UserModel, instance_name: str, outputs: List[str], memory: Memory
    ) -> None:
        self._model = model
        self._name = instance_name
        self._outputs = outputs
        self._memory = memory

    def run(self, batch: Execute) -> List[ToHost]:
        """Everything the host is to be told about this batch, `BatchDone` last."""
        started = time.monotonic_ns()
        number = batch.batch
        memory = self._memory
        failure: Optional[str] = None
        answers: Sequence[WireResponse]
        placed: List[Block] = []
        inputs_ready = outputs_begin = started
        try:
            requests = [
                request_from(wire, memory, (number, index), self._outputs)
                for index, wire in enumerate(batch.requests)
            ]
            inputs_ready = outputs_begin = time.monotonic_ns()
            responses = self._call(requests)
            outputs_begin = time.monotonic_ns()
            answers = [
                response_to(response, wire.outputs or self._outputs, memory, placed)
                if response is not None
                else _unanswered(self._name)
                for response, wire in zip(responses, batch.requests)
            ]
            memory.tell(placed)
        except BaseException as error:
            text = str(error) if isinstance(error, BadReturn) else describe_exception(error)
            failure = f"Failed to process the request(s) for model '{self._name}', message: {text}"
            answers = [failed(failure)] * len(batch.requests)
        messages: List[ToHost] = [
            Respond(number, index, answer) for index, answer in enumerate(answers)
        ]
        messages.append(
            BatchDone(number, started, inputs_ready, outputs_begin, time.monotonic_ns(), failure)
        )
        return messages

    def give_up(self, batch: Execute, error: Exception) -> List[ToHost]:
        """What the host is told when the answers cannot be sent."""
        text = f"the answers of model '{self._name}' cannot be sent: {error!r}"
        now = time.monotonic_ns()
        answers: List[ToHost] = [
            Respond(batch.batch, index, failed(text)) for index in range(len(batch.requests))
        ]
        return [*answers, BatchDone(batch.batch, now, now, now, now, text)]

    def _call(
        self, requests: List[pb_utils.InferenceRequest]
    ) -> List[Optional[pb_utils.InferenceResponse]]:
        instance = self._model.instance
        if not hasattr(instance, "execute"):
            raise BadReturn(f"Python model {self._model.path} does not implement `execute` method.")
        return check_return(instance.execute(requests), len(requests))


def _unanswered(name: str) -> WireResponse:
    return failed(
        f"Model instance '{name}' returned no response for this request: `execute` must return one"
        " InferenceResponse for each request"
    )
