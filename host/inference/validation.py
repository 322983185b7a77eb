"""The inputs and outputs of a model, compiled from its configuration to validate requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from host.config.schema import ModelConfig
from host.errors import invalid_argument
from host.inference.call import Call
from host.inference.request import InferRequest, Tensor
from host.inference.tensor_spec import (
    InputSpec,
    TensorSpec,
    byte_size,
    raise_invalid_input,
    wire_name,
)

_CORRID = 3  # ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID
_INTEGER_IDS = ("UINT64", "INT64", "UINT32", "INT32")


class Signature:
    """The inputs and outputs of one model version. Shapes include the batch dimension."""

    def __init__(self, config: ModelConfig) -> None:
        name = self._model = config.name
        self._max_batch_size = max(0, config.max_batch_size)
        largest = self._max_batch_size
        self._inputs = {entry.name: InputSpec(entry, name, largest) for entry in config.input}
        self._required = [key for key, entry in self._inputs.items() if not entry.optional]
        self._fewest = len(self._required)
        self._most = len(self._inputs)
        self._outputs = {entry.name: TensorSpec(entry, largest) for entry in config.output}
        self._reshapes_output = any(entry.reshapes for entry in self._outputs.values())
        # Fixed shapes are equal anyway, and ragged inputs may differ.
        self._must_match = [
            entry.name
            for entry in config.input
            if -1 in entry.dims and not entry.allow_ragged_batch
        ]
        # Shape tensors have no batch dimension. They share a batch if all values but the first are
        # equal.
        self._of_shape = {entry.name for entry in config.input if entry.is_shape_tensor}
        self._corrid = _corrid_control(config)
        # Whether a request needs no further check once one of its shape has passed.
        self._lasting = self._corrid is None and not any(
            entry.reshapes or entry.content_counts for entry in self._inputs.values()
        )

    def validate_request(self, request: InferRequest) -> None:
        """Validates a request and prepares it for the model.

        Sets `request.batch_size`. Replaces tensors that the configuration reshapes by tensors with
        the model's shape. Copies inputs out of the client's shared memory if the host has to read
        their content. Raises HostError INVALID_ARG with the texts of docs/reference/protocol.md,
        "Duplicates" and "The request against the model", in their order, or INTERNAL if that memory
        is gone.
        """
        shape = request.shape
        if shape is not None and shape.accepted_by is self:
            request.batch_size = shape.batch_size
            return
        self.validate_tensors(request)
        if self._corrid is not None:
            self._check_correlation_id(request)
        if shape is not None and self._lasting:
            shape.accepted_by, shape.batch_size = self, request.batch_size

    def validate_tensors(self, request: InferRequest) -> None:
        """As `validate_request`, for a request without a sequence, whatever the model expects."""
        inputs = request.inputs
        count = len(inputs)
        if count > 1 and len({tensor.name for tensor in inputs}) < count:
            raise_invalid_input(
                request,
                f"input '{_first_duplicate(t.name for t in inputs)}' already exists in request",
            )
        outputs = request.requested_outputs
        if outputs and (len(outputs) > 1 or outputs[0] not in self._outputs):
            self._check_outputs(request)
        if not self._fewest <= count <= self._most:
            raise_invalid_input(request, self._count_text(inputs))
        known = self._inputs
        expected: list[InputSpec] = []
        try:
            for tensor in inputs:
                expected.append(known[tensor.name])  # noqa: PERF401 - without a call
        except KeyError:
            # Of several errors, the unknown name is reported first.
            name = next(tensor.name for tensor in inputs if tensor.name not in known)
            raise invalid_argument(
                f"unexpected inference input '{name}' for model '{self._model}'"
            ) from None
        request.batch_size = self._batch_size(request) if self._max_batch_size else 1
        for index, entry in enumerate(expected):
            if entry.content_counts:
                inputs[index] = entry.copy_from_shared_memory(inputs[index], request)
            if entry.validate_tensor(inputs[index], request):
                inputs[index] = entry.to_model_shape(inputs[index])

    @property
    def reshapes_outputs(self) -> bool:
        """Whether clients see an output in another shape than the model returns."""
        return self._reshapes_output

    def restore_output_shape(self, tensor: Tensor) -> Tensor:
        """An output in the client's shape: undoes the reshape of the configuration.

        A tensor that does not have the reshaped form is returned unchanged
        (docs/reference/configuration-and-scheduling.md, "Reshape").
        """
        if not self._reshapes_output:
            return tensor
        entry = self._outputs.get(tensor.name)
        if entry is None or not entry.reshapes:
            return tensor
        return entry.to_client_shape(tensor)

    def can_share_batch(self, first: Call, other: Call) -> bool:
        """Whether two validated calls may share a batch.

        Source: docs/reference/scheduling.md, "Which requests may share a batch".
        """
        shape = first.request.shape
        if shape is not None and shape is other.request.shape and shape.accepted_by is self:
            return True
        ours = first.request.inputs
        theirs = other.request.inputs
        if self._fewest < self._most and {t.name for t in ours} != {t.name for t in theirs}:
            return False
        if self._of_shape and not self._same_sizes(ours, theirs):
            return False
        if not self._must_match:
            return True
        shapes = {tensor.name: tensor.shape[1:] for tensor in ours}
        return all(
            shapes.get(tensor.name) == tensor.shape[1:]
            for tensor in theirs
            if tensor.name in self._must_match
        )

    def _same_sizes(self, ours: list[Tensor], theirs: list[Tensor]) -> bool:
        values = {t.name: _after_first(t) for t in ours if t.name in self._of_shape}
        return all(
            values.get(tensor.name) == _after_first(tensor)
            for tensor in theirs
            if tensor.name in self._of_shape
        )

    def _check_outputs(self, request: InferRequest) -> None:
        names = request.requested_outputs
        if len(names) > 1 and len(set(names)) < len(names):
            raise_invalid_input(
                request, f"output '{_first_duplicate(names)}' already exists in request"
            )
        unknown = [name for name in names if name not in self._outputs]
        if unknown:
            raise invalid_argument(
                f"unexpected inference output '{min(unknown)}' for model '{self._model}'"
            )

    def _count_text(self, inputs: list[Tensor]) -> str:
        # Triton lists a hash table, which mostly has the newest first.
        given = [tensor.name for tensor in reversed(inputs)]
        missing = [name for name in self._required if name not in given]
        if self._fewest == self._most:
            expected = f"{self._most} inputs"
        else:
            expected = f"number of inputs between {self._fewest} and {self._most}"
        # The lone bracket of an empty list of missing inputs is Triton's.
        return (
            f"expected {expected} but got {len(inputs)} inputs for model '{self._model}'."
            f" Got input(s) [{_quoted(given)}], but missing required input(s)"
            f" {'[' + _quoted(missing) if missing else ''}]."
            " Please provide all required input(s)."
        )

    def _batch_size(self, request: InferRequest) -> int:
        size, found = -1, False
        for tensor in request.inputs:
            if tensor.name in self._of_shape:
                continue
            found = True
            shape = tensor.shape
            if not shape:
                raise_invalid_input(
                    request,
                    f"input '{tensor.name}' has no shape but model requires batch dimension"
                    f" for '{self._model}'",
                )
            if size == -1:
                size = shape[0]
            elif shape[0] != size:
                raise_invalid_input(
                    request,
                    f"input '{tensor.name}' batch size does not match other inputs"
                    f" for '{self._model}'",
                )
        if not found:
            return 1
        if not 0 <= size <= self._max_batch_size:
            raise_invalid_input(
                request,
                f"inference request batch-size must be <= {self._max_batch_size}"
                f" for '{self._model}'",
            )
        return size

    def _check_correlation_id(self, request: InferRequest) -> None:
        assert self._corrid is not None
        control, expected = self._corrid
        given = "BYTES" if isinstance(request.correlation_id, str) else "UINT64"
        if (given == expected) if given == "BYTES" else (expected in _INTEGER_IDS):
            return
        raise_invalid_input(
            request,
            f"sequence batching control '{control}' data-type is '{given}',"
            f" but model '{self._model}' expects '{expected}'",
        )


def _after_first(tensor: Tensor) -> bytes:
    return bytes(tensor.data)[byte_size(tensor.datatype) :]


def _first_duplicate(names: Iterable[str]) -> str:
    """The first name that occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            break
        seen.add(name)
    return name


def _quoted(names: Sequence[str]) -> str:
    return ",".join(f"'{name}'" for name in names)


def _corrid_control(config: ModelConfig) -> tuple[str, str] | None:
    """Name and data type of the tensor that takes the correlation id of a sequence model."""
    for control_input in config.sequence_batching.control_input:
        for control in control_input.control:
            if control.kind == _CORRID:
                return control_input.name, wire_name(control.data_type)
    return None
