"""Sends copies of requests to the shadow version, and compares its responses."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from host.errors import HostError, unavailable
from host.inference.call import Call, CallListener
from host.inference.request import (
    InferRequest,
    InferResponse,
    SharedMemoryBytes,
    Tensor,
    copy_from_shared_memory,
)
from host.models.registry import LoadedModel

_log = logging.getLogger("pbhost")

MAX_COPIES = 64
"""Copied requests of a model that are in progress; further ones are not copied."""

_MAX_BYTES = 16 << 20  # bytes of outputs that are kept for one comparison
_INLINE_BYTES = 65536  # bytes of outputs that are compared without a thread


class ComparisonResult(enum.Enum):
    """What became of a copied request, as in the metrics."""

    EQUAL = "equal"
    DIFFERENT = "different"
    FAILED = "failed"  # the shadow version refused or failed a request that was answered
    SKIPPED = "skipped"  # not copied, or not compared


class ShadowVersion:
    """The shadow version of a model. Belongs to the event loop.

    Its calls never change the answer of a client; their results are only counted in `comparisons`,
    by version and result.
    """

    def __init__(
        self, model: LoadedModel, comparisons: Counter[tuple[int, ComparisonResult]]
    ) -> None:
        self.model = model
        self._counts = comparisons
        self._copies = 0
        self._comparisons: set[asyncio.Future[bool]] = set()

    def copy_request(self, request: InferRequest) -> InferRequest | None:
        """A copy for the shadow; None if the request cannot be copied, or too many are."""
        if self._copies >= MAX_COPIES or request.output_placement is not None:
            self._count(ComparisonResult.SKIPPED)
            return None
        try:
            # The client may change its memory as soon as it has its answer.
            inputs = [copy_from_shared_memory(tensor) for tensor in request.inputs]
        except HostError:  # the request itself fails with the same error, and the client gets it
            self._count(ComparisonResult.SKIPPED)
            return None
        return msgspec.structs.replace(
            request,
            inputs=inputs,
            requested_outputs=list(request.requested_outputs),
            parameters=dict(request.parameters),
            model_version=self.model.version,
            trace=None,
            output_placement_hints=None,
            classification=None,
        )

    def follow(self, call: Call, copy: InferRequest) -> bool:
        """Sends the copy of a request to the shadow, and compares when both have responded.

        Returns whether the shadow got it. `call`: the request that the client has sent, just after
        its start.
        """
        if call.finished:  # the response cache had the response
            self._count(ComparisonResult.SKIPPED)
            return False
        try:
            shadow = self.model.infer(copy)
        except HostError:
            self._count(ComparisonResult.FAILED)
            return False
        self._copies += 1
        comparison = _Comparison(self, call, shadow)
        call.listener = comparison
        shadow.subscribe(comparison.shadow_responded)
        return True

    def finish(self, comparison: _Comparison) -> None:
        """Compares the responses to one request; called once."""
        self._copies -= 1
        ours, theirs = comparison.responses, comparison.shadow_responses
        if comparison.skipped:
            self._count(ComparisonResult.SKIPPED)
        elif _failed(theirs) and not _failed(ours):
            self._count(ComparisonResult.FAILED)
        elif comparison.size <= _INLINE_BYTES:
            self._count_comparison(are_equal(ours, theirs))
        else:
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(None, are_equal, ours, theirs)
            self._comparisons.add(work)
            work.add_done_callback(self._compared)

    def _compared(self, work: asyncio.Future[bool]) -> None:
        self._comparisons.discard(work)
        if work.cancelled():
            self._count(ComparisonResult.SKIPPED)
        elif (error := work.exception()) is not None:
            _log.error("unexpected failure of a comparison", exc_info=error)
        else:
            self._count_comparison(work.result())

    def _count_comparison(self, equal: bool) -> None:
        self._count(ComparisonResult.EQUAL if equal else ComparisonResult.DIFFERENT)

    def _count(self, result: ComparisonResult) -> None:
        self._counts[(self.model.version, result)] += 1


class _Comparison:
    """The responses to one request, instead of the listener of the client's call."""

    observes_responses = True

    __slots__ = (
        "responses",
        "shadow_responses",
        "size",
        "skipped",
        "_listener",
        "_open",
        "_owner",
        "_shadow",
    )

    def __init__(self, owner: ShadowVersion, call: Call, shadow: Call) -> None:
        self.responses: list[InferResponse] = []
        self.shadow_responses: list[InferResponse] = []
        self.size = 0
        self.skipped = False
        self._listener: CallListener | None = call.listener
        self._open = 2  # calls
        self._owner = owner
        self._shadow = shadow

    def call_responded(self, call: Call, response: InferResponse) -> None:
        if self._listener is not None:
            self._listener.call_responded(call, response)
        self._keep(self.responses, response)

    def call_finished(self, call: Call) -> None:
        if self._listener is not None:
            self._listener.call_finished(call)
        if call.cancelled:
            self._skip()
        self._close_one()

    def shadow_responded(self, response: InferResponse | None, final: bool) -> None:
        """Called with each response of the shadow."""
        if response is not None:
            self._shadow.acknowledge_response(response)
            self._keep(self.shadow_responses, response)
        if final:
            self._close_one()

    def _keep(self, responses: list[InferResponse], response: InferResponse) -> None:
        if self.skipped:
            return
        self.size += response_bytes(response)
        if self.size > _MAX_BYTES:
            self._skip()
            return
        # Users of a response may replace the data of its tensors.
        outputs = [Tensor(o.name, o.datatype, o.shape, o.data, o.owner) for o in response.outputs]
        kept = InferResponse(response.model_name, response.model_version, outputs=outputs)
        kept.error = response.error
        responses.append(kept)

    def _skip(self) -> None:
        """Ends the comparison, as there is nothing to compare, or too much."""
        if not self.skipped:
            self.skipped = True
            self.responses.clear()
            self.shadow_responses.clear()
            # In a later turn of the loop: the client's call is ending now.
            asyncio.get_running_loop().call_soon(
                self._shadow.abort, unavailable("the comparison has ended")
            )

    def _close_one(self) -> None:
        self._open -= 1
        if not self._open:
            self._owner.finish(self)


def _failed(responses: list[InferResponse]) -> bool:
    return any(response.error is not None for response in responses)


_FLOATS = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}


def are_equal(first: Sequence[InferResponse], second: Sequence[InferResponse]) -> bool:
    """Whether two versions gave the same responses, in the same order.

    Outputs are equal if datatype, shape and bytes are; numbers with a fraction may differ by a
    relative 1e-5 (`numpy.allclose`). Errors are equal if their codes are.
    """
    return len(first) == len(second) and all(map(_is_equal, first, second))


def response_bytes(response: InferResponse) -> int:
    """The bytes of all outputs."""
    return sum(len(_bytes(output) or b"") for output in response.outputs)


def _is_equal(first: InferResponse, second: InferResponse) -> bool:
    if first.error is not None or second.error is not None:
        codes = [None if one.error is None else one.error.code for one in (first, second)]
        return codes[0] is codes[1]
    outputs = {output.name: output for output in second.outputs}
    return len(first.outputs) == len(outputs) and all(
        output.name in outputs and _is_equal_tensor(output, outputs[output.name])
        for output in first.outputs
    )


def _is_equal_tensor(first: Tensor, second: Tensor) -> bool:
    if (first.datatype, list(first.shape)) != (second.datatype, list(second.shape)):
        return False
    ours, theirs = _bytes(first), _bytes(second)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return False
    number = _FLOATS.get(first.datatype)
    if ours == theirs or number is None:
        return ours == theirs
    return np.allclose(np.frombuffer(ours, number), np.frombuffer(theirs, number), equal_nan=True)


def _bytes(tensor: Tensor) -> memoryview | None:
    """The bytes of a tensor; None if they are in memory of a client."""
    if isinstance(tensor.data, SharedMemoryBytes):
        return None
    return memoryview(tensor.data).cast("B")
