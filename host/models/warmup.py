"""Warm-up requests, which each instance runs before it takes work.

Source: docs/reference/configuration-and-scheduling.md, "Warm-up".
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from host.config.schema import ConfigPart, ModelConfig
from host.errors import ErrorCode, HostError, internal, invalid_argument
from host.inference.call import Batch, Call
from host.inference.request import ExecutionTimes, InferRequest, InferResponse, Tensor
from host.inference.tensor_spec import byte_size, raise_invalid_input, wire_name
from host.inference.validation import Signature
from host.instances.instance import Instance
from host.instances.stub_process import stub_lost
from host.system.files import read_file

_log = logging.getLogger("pbhost")

_FOLDER = "warmup"
_ANONYMOUS = InferRequest("", [])
_NO_TYPE = "<invalid>"


@dataclass(frozen=True, slots=True)
class _Sample:
    """One `model_warmup` entry: `inputs` of one request, and the `batch_size` in requests."""

    name: str
    batch_size: int
    count: int
    inputs: Sequence[Tensor]
    extra: Sequence[Tensor]


class Warmup:
    """The warm-up samples of one model version, made once and run on each instance.

    `new_call` makes calls; `report` is called with finished batches. Reads files. Raises HostError.
    """

    def __init__(self, config: ModelConfig, directory: Path, signature: Signature) -> None:
        self._model: str = config.name
        self._most: int = config.max_batch_size
        self._signature = signature
        self._samples: list[_Sample] = []
        known = {entry.name for entry in config.input}
        lead = [1] if config.max_batch_size > 0 else []
        for setting in config.model_warmup:
            if not setting.batch_size:
                _log.debug("skipping batch 0 warmup sample '%s' of '%s'", setting.name, self._model)
                continue
            inputs: list[Tensor] = []
            extra: list[Tensor] = []
            for name, given in sorted(setting.inputs.items()):
                shape, data = _content(name, given, directory, self._model)
                datatype = wire_name(given.data_type)
                # Controls and states are not inputs of clients.
                tensors = inputs if name in known else extra
                tensors.append(Tensor(name, datatype, lead + shape, data))
            sample = _Sample(setting.name, setting.batch_size, max(1, setting.count), inputs, extra)
            self._request(sample)  # raises for a request that the model would refuse
            self._samples.append(sample)

    def _request(self, sample: _Sample) -> InferRequest:
        """The request as the scheduler would pass it to an instance. Raises HostError."""
        request = InferRequest(self._model, [_copy(tensor) for tensor in sample.inputs])
        self._signature.validate_tensors(request)
        request.inputs += [_copy(tensor) for tensor in sample.extra]
        return request

    async def run(
        self,
        instance: Instance,
        new_call: Callable[[InferRequest], Call],
        report: Callable[[Sequence[Batch]], None],
    ) -> None:
        """Runs every sample on an initialised instance. Raises HostError if one fails."""
        for sample in self._samples:
            for iteration in range(1, sample.count + 1):
                _log.debug(
                    "model '%s' instance %s is running warmup sample '%s' for iteration %d",
                    self._model, instance.name, sample.name, iteration,
                )  # fmt: skip
                errors = self._batch_too_large_error(sample.batch_size, instance.name)
                if not errors:
                    calls = [new_call(self._request(sample)) for _ in range(sample.batch_size)]
                    running = _execute(instance, calls, report)
                    try:
                        errors = await asyncio.wait_for(running, instance.load_seconds)
                    except asyncio.TimeoutError:
                        raise stub_lost(
                            f"failed to run warmup sample '{sample.name}': Stub process"
                            f" '{instance.name}' is not healthy. It did not complete this request"
                            f" within {instance.load_seconds:g} s."
                        ) from None
                if errors:
                    texts = "".join(f"{error.message}; " for error in errors)
                    text = f"failed to run warmup sample '{sample.name}': {texts}"
                    if instance.killed_by_signal:
                        raise stub_lost(text, ErrorCode.INVALID_ARG)
                    raise invalid_argument(text)

    def _batch_too_large_error(self, size: int, instance: str) -> list[HostError]:
        """The errors of a batch that is larger than the model allows; at most a thousand.

        One request is always allowed (docs/reference/model-processes.md, "Batch checks").
        """
        if size <= max(1, self._most):
            return []
        text = f"batch size {size} for '{instance}', max allowed is {self._most}"
        return [invalid_argument(text)] * min(size, 1000)


async def _execute(
    instance: Instance, calls: Sequence[Call], report: Callable[[Sequence[Batch]], None]
) -> list[HostError]:
    """Runs a batch without the scheduler, to its last response; returns the errors."""
    released = asyncio.Event()
    errors: list[HostError] = []
    open_calls = set(calls)
    answered = asyncio.Event()

    def done(_: Batch, times: ExecutionTimes | None, free: bool) -> None:
        released.set()  # also if the process has died

    def responder(call: Call) -> Callable[[InferResponse | None, bool], None]:
        def respond(response: InferResponse | None, final: bool) -> None:
            if response is not None:
                if response.error is not None:
                    errors.append(response.error)
                # Otherwise the model would wait before it sends more.
                call.acknowledge_response(response)
            if final:
                open_calls.discard(call)
                if not open_calls:
                    answered.set()

        return respond

    for call in calls:
        call.subscribe(responder(call))
    instance.session.run_batch(Batch(calls, released.set, done, report))
    await answered.wait()
    await released.wait()
    return errors


def _copy(tensor: Tensor) -> Tensor:
    """A copy for each request, as sending a request moves its bytes."""
    return Tensor(tensor.name, tensor.datatype, list(tensor.shape), tensor.data)


def _content(name: str, given: ConfigPart, directory: Path, model: str) -> tuple[list[int], bytes]:
    """Shape and bytes of one batch item of an input. Raises HostError."""
    shape = list(given.dims)
    if any(size < 0 for size in shape):
        raise invalid_argument(
            f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
        )
    datatype = wire_name(given.data_type)
    if datatype == _NO_TYPE:
        raise invalid_argument(
            f"warmup setting expects input '{name}' of model '{model}' to have a data_type"
        )
    size = prod(shape) * byte_size(datatype)
    source = given.WhichOneof("input_data_type")
    if source is None:
        raise_invalid_input(
            _ANONYMOUS, f"warmup setting expects input '{name}' to have input_data_type set"
        )
    if source == "input_data_file":
        return shape, _from_file(directory, given.input_data_file, datatype, size, model)
    if source == "random_data" and datatype not in ("BYTES", "BOOL"):
        return shape, os.urandom(size)
    if source == "random_data" and datatype == "BOOL":
        return shape, bytes(byte & 1 for byte in os.urandom(size))
    return shape, bytes(size)


def _from_file(directory: Path, name: str, datatype: str, size: int, model: str) -> bytes:
    path = directory / _FOLDER / name
    if not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(directory / _FOLDER)):
        raise invalid_argument(
            f"warmup data file '{path}' of model '{model}' is outside of its folder '{_FOLDER}'"
        )
    try:
        data = read_file(path)
    except OSError as error:
        raise internal(f"failed to open text file for read {path}: {error.strerror}") from None
    if datatype == "BYTES":
        return data  # its elements are checked like a client's
    if len(data) < size:
        raise_invalid_input(
            _ANONYMOUS,
            f"warmup setting expects {size} bytes, but the data provided from {name}only has"
            f" {len(data)} bytes",
        )
    return data[:size]
