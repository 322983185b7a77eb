"""Parses the JSON of an inference request (docs/reference/http.md, "Inference request")."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec

from host.errors import HostError, internal, invalid_argument
from host.frontends.http import json_text as json
from host.frontends.http.json_arrays import CutText
from host.frontends.http.tensors import ALL_NAMES, read_tensor
from host.inference.request import Parameter, RequestShape, checked_correlation_text
from host.instances.regions import RegionPart

_MAX_KEPT_BYTES = 1024
"""Bytes of a JSON part whose InferenceHeader is kept until another one comes."""

MAX_TENSORS = 2048
"""The maximum number of inputs, of outputs, and of parameters; a model with more raises it."""

MAX_INLINE_BYTES = 65536
"""Bytes of a JSON part that is decoded in the event loop, in at most 5 ms."""

_MAX_SLOW_BYTES = 8192  # bytes of a JSON part that `json_reader` may read in the event loop
_MAX_REST_BYTES = 8 << 20  # bytes of a JSON part without its large arrays
_MAX_REST_VALUES = 131072  # decoded in 20 ms, during which the interpreter does nothing else
_VALUES_PER_TENSOR = 64

_INT64 = 1 << 63


class InputHeader(msgspec.Struct):
    """One input: `data`, or a region, or the next `binary_size` bytes of the body."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes | None = None
    binary_size: int = 0
    region: RegionPart | None = None


class OutputHeader(msgspec.Struct):
    """One requested output. `classes` is the number of classes; 0 requests the tensor.

    `binary` is its own `binary_data`, None without one.
    """

    name: str
    binary: bool | None = None
    classes: int = 0
    region: RegionPart | None = None


class InferenceHeader(msgspec.Struct):
    """A parsed JSON part. All requests with the same JSON share it, so its fields never change.

    `outputs` is an error if the outputs are invalid, because other errors are reported before it.
    Otherwise `output_names` are their names, and `binary_names` those that the client wants as
    binary data. `shape` is that of the requests, if the JSON has come more than once.
    """

    id: str = ""
    inputs: list[InputHeader] = []
    outputs: list[OutputHeader] | HostError = []
    binary_output: bool = False
    parameters: dict[str, Parameter] = {}
    correlation_id: int | str = 0
    flags: int = 0
    priority: int = 0
    timeout_us: int = 0
    output_names: list[str] = []
    binary_names: Container[str] = ()
    places_outputs: bool = False
    """Whether outputs are invalid, classified, or written to memory of the client."""
    shape: RequestShape | None = None


_Size = Annotated[int, msgspec.Meta(ge=0, le=_INT64 - 1)]


class _UsualSource(msgspec.Struct, forbid_unknown_fields=True):
    binary_data_size: _Size | None = None
    shared_memory_region: str = ""
    shared_memory_byte_size: _Size = 0
    shared_memory_offset: _Size = 0


class _UsualInput(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    shape: list[_Size]
    datatype: str
    data: list[int | float] | None = None
    parameters: _UsualSource | None = None


class _UsualFormat(msgspec.Struct, forbid_unknown_fields=True):
    binary_data: bool | None = None
    classification: _Size = 0


class _UsualOutput(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    parameters: _UsualFormat | None = None


class _UsualRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What clients usually send. With a default value in it, `_read_document` reads a request."""

    inputs: list[_UsualInput]
    id: str = ""
    outputs: list[_UsualOutput] = []
    parameters: dict[str, str | bool | int | float] = {}


_decode_usual = msgspec.json.Decoder(_UsualRequest).decode
_USUAL_FORMAT = _UsualFormat()


def _count_members(request: _UsualRequest) -> int:
    """The number of members in all objects; 0 if an input does not have one source of its data."""
    count = 1 + bool(request.id) + bool(request.outputs)
    if request.parameters:
        count += 1 + len(request.parameters)
    for given in request.inputs:
        sources = int(given.data is not None)
        count += 3 + sources
        source = given.parameters
        if source is not None:
            of_body, of_region = source.binary_data_size is not None, source.shared_memory_region
            sources += of_body + bool(of_region)
            place = bool(source.shared_memory_offset) + bool(source.shared_memory_byte_size)
            count += 1 + of_body + bool(of_region) + place
        if sources != 1:
            return 0
    for wanted in request.outputs:
        form = wanted.parameters
        count += 1
        if form is not None:
            count += 1 + (form.binary_data is not None) + bool(form.classification)
    return count


class InferenceHeaderReader:
    """Parses JSON parts; inputs in JSON form have at most `max_size` bytes.

    Clients often send the same one again: the last one is kept.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._last_text: bytes | None = None
        self._last_head = InferenceHeader()
        # One thread: several would keep the event loop waiting for the interpreter.
        self._thread = ThreadPoolExecutor(1, "json")

    def read(self, text: bytes) -> InferenceHeader:
        """Parses a JSON part of at most MAX_INLINE_BYTES bytes.

        Raises HostError with the texts of docs/reference/http.md, "Inference request"; SlowText
        if the text must be read with `read_any`.
        """
        if text == self._last_text:
            known = self._last_head
            if known.shape is None:
                known.shape = RequestShape()
            return known
        head = self._read_usual(text)
        if head is None:
            document = json.parse(text, len(text) <= _MAX_SLOW_BYTES)
            head = self._read_document(document, MAX_TENSORS, MAX_TENSORS, None)
        if len(text) <= _MAX_KEPT_BYTES:
            self._last_text, self._last_head = text, head
        return head

    async def read_any(self, text: bytes, inputs: int, outputs: int) -> InferenceHeader:
        """Parses a JSON part of any size, in a thread if that may take long. Raises HostError.

        `inputs` and `outputs` are the numbers that the model has.
        """
        if len(text) <= MAX_INLINE_BYTES:
            try:
                return self.read(text)
            except json.SlowText:
                pass
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.read_large, text, inputs, outputs)

    def read_large(self, text: bytes, inputs: int = 0, outputs: int = 0) -> InferenceHeader:
        """Parses a JSON part of any size. Raises HostError. Blocks, but shares the interpreter."""
        most_inputs, most_outputs = max(inputs, MAX_TENSORS), max(outputs, MAX_TENSORS)
        cut = CutText(text, most_inputs)
        _check_size_of_rest(cut.rest, most_inputs + most_outputs)
        try:
            document = json.parse(cut.rest)
        except HostError as error:
            raise cut.original_error(error) from None
        head = self._read_document(document, most_inputs, most_outputs, cut)
        cut.check_unread_arrays()
        return head

    def _read_usual(self, text: bytes) -> InferenceHeader | None:
        """Reads a usual request. `_read_document` reads any other, or reports its error.

        One colon for each member shows that no name is repeated, and no string has a colon.
        """
        if b"\\" in text or not text.isascii():
            return None
        try:
            usual = _decode_usual(text)
        except msgspec.MsgspecError:
            return None
        if text.count(b":") != _count_members(usual):
            return None
        if max(len(usual.inputs), len(usual.outputs)) > MAX_TENSORS:
            return None
        head = InferenceHeader(id=usual.id)
        if usual.parameters:
            _apply_parameters(usual.parameters, head)
        for given in usual.inputs:
            name, datatype, shape = given.name, given.datatype, given.shape
            entry = InputHeader(name, datatype, shape)
            source = given.parameters
            if given.data is not None:
                entry.data = read_tensor(name, datatype, shape, given.data, self._max_size, True)
            elif source is not None and source.binary_data_size is not None:
                entry.binary_size = source.binary_data_size
            elif source is not None:
                size, offset = source.shared_memory_byte_size, source.shared_memory_offset
                entry.region = RegionPart(source.shared_memory_region, offset, size)
            head.inputs.append(entry)
        outputs: list[OutputHeader] = []
        for wanted in usual.outputs:
            form = wanted.parameters or _USUAL_FORMAT
            outputs.append(OutputHeader(wanted.name, form.binary_data, form.classification))
        _describe_outputs(head, outputs)
        return head

    def _read_document(
        self,
        document: Any,
        most_inputs: int,
        most_outputs: int,
        cut: CutText | None,
    ) -> InferenceHeader:
        head = InferenceHeader()
        if not isinstance(document, dict):
            document = {}
        if "id" in document:
            head.id = _parse_field("id", json.as_text, document["id"])
        if "parameters" in document:
            _apply_parameters(document["parameters"], head)
        inputs = _parse_field("inputs", json.as_array, _parse_member(document, "inputs"))
        _check_count("inputs", inputs, most_inputs)
        head.inputs = [self._read_input(value, cut) for value in inputs]
        try:
            given: list[Any] = []
            if "outputs" in document:
                given = _parse_field("outputs", json.as_array, document["outputs"])
                _check_count("outputs", given, most_outputs)
            _describe_outputs(head, [_read_output(value) for value in given])
        except HostError as error:
            head.outputs = error
            head.places_outputs = True
        return head

    def _read_input(self, value: Any, cut: CutText | None) -> InputHeader:
        parameters = _parameters_of(value)
        sources = [
            name
            for name, owner in (
                ("data", value),
                ("binary_data_size", parameters),
                ("shared_memory_region", parameters),
            )
            if isinstance(owner, dict) and name in owner
        ]
        if len(sources) != 1:
            raise _wrong_sources(sources)
        name = _parse_field("name", json.as_text, _parse_member(value, "name"))
        shape = _parse_shape(_parse_member(value, "shape"))
        datatype = _parse_field("datatype", json.as_text, _parse_member(value, "datatype"))
        head = InputHeader(name, datatype, shape)
        if sources == ["data"]:
            data = value["data"]
            if cut is not None:
                data = cut.array(data) or data
            head.data = read_tensor(name, datatype, shape, data, self._max_size)
        elif sources == ["binary_data_size"]:
            size = parameters["binary_data_size"]
            head.binary_size = _parse_field("binary_data_size", json.as_unsigned, size)
        else:
            head.region = _parse_region(parameters)
        return head


def _check_size_of_rest(rest: bytes, tensors: int) -> None:
    """Raises HostError INVALID_ARG if the JSON without its large arrays is slow to decode."""
    if len(rest) > _MAX_REST_BYTES:
        raise invalid_argument(
            f"expected at most {_MAX_REST_BYTES} bytes besides tensor data in the request JSON,"
            f" but got {len(rest)}"
        )
    most = _MAX_REST_VALUES + _VALUES_PER_TENSOR * tensors
    values = rest.count(b",") + 1  # nested ones without a comma have limits of their own
    if values > most:
        raise invalid_argument(
            f"expected at most {most} values besides tensor data in the request JSON, but got"
            f" {values}"
        )


def _check_count(name: str, values: Sequence[Any], most: int) -> None:
    if len(values) > most:
        raise invalid_argument(
            f"expected at most {most} '{name}' in the request JSON, but got {len(values)}"
        )


def _wrong_sources(sources: list[str]) -> HostError:
    names = " ".join(f"'{name}'" for name in sources)
    given = f"But set {names}" if sources else "But no field is set"
    return invalid_argument(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in"
        f" 'parameters', 'shared_memory_region' in 'parameters'. {given}"
    )


def _describe_outputs(head: InferenceHeader, outputs: list[OutputHeader]) -> None:
    """Sets valid outputs, and the fields that follow from them."""
    default = head.binary_output
    binary_names = []
    for output in outputs:
        head.output_names.append(output.name)
        if output.classes or output.region:
            head.places_outputs = True
        if default if output.binary is None else output.binary:
            binary_names.append(output.name)
    head.outputs = outputs
    head.binary_names = ALL_NAMES if default and not outputs else binary_names


def _read_output(value: Any) -> OutputHeader:
    head = OutputHeader(_parse_field("name", json.as_text, _parse_member(value, "name")))
    parameters = _parameters_of(value)
    if "classification" in parameters:
        try:
            head.classes = json.as_unsigned(parameters["classification"])
        except HostError as error:
            raise json.with_context("Unable to set 'classification'", error) from None
    head.region = _parse_region(parameters)
    if head.region is not None and head.classes:
        raise invalid_argument("Output can't set both 'shared_memory_region' and 'classification'")
    if "binary_data" in parameters:
        head.binary = _parse_field("binary_data", json.as_bool, parameters["binary_data"])
        if head.binary and head.region is not None:
            raise invalid_argument("Output can't set both 'shared_memory_region' and 'binary_data'")
    return head


def _parameters_of(value: Any) -> dict[str, Any]:
    found = value.get("parameters") if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _parse_shape(value: Any) -> list[int]:
    try:
        dims = [json.as_unsigned(dim) for dim in json.as_array(value)]
    except HostError as error:
        raise json.with_context("Unable to parse 'shape'", error) from None
    # Sizes become signed 64-bit numbers: larger ones become negative.
    return [dim if dim < _INT64 else dim - 2 * _INT64 for dim in dims]


def _parse_region(parameters: dict[str, Any]) -> RegionPart | None:
    if "shared_memory_region" not in parameters:
        return None
    name = _parse_field("shared_memory_region", json.as_text, parameters["shared_memory_region"])
    offset, size = (
        _parse_field(key, json.as_unsigned, parameters.get(key, 0))
        for key in ("shared_memory_offset", "shared_memory_byte_size")
    )
    return RegionPart(name, offset, size)


def _apply_parameters(value: Any, head: InferenceHeader) -> None:
    """Stores known parameters in their fields, and all others in `parameters`."""
    try:
        pairs = json.members(value)
    except HostError as error:
        raise json.with_context("failed to get request params.", error) from None
    _check_count("parameters", pairs, MAX_TENSORS)
    seen = set()
    for key, parameter in pairs:
        if key in seen:
            continue  # the first one counts
        seen.add(key)
        if key == "sequence_id":
            head.correlation_id = _parse_correlation_id(parameter)
        elif key in ("sequence_start", "sequence_end"):
            if _parse_field(key, json.as_bool, parameter):
                head.flags |= 1 if key == "sequence_start" else 2
        elif key == "priority":
            head.priority = _parse_field(key, json.as_unsigned, parameter)
        elif key == "timeout":
            head.timeout_us = _parse_field(key, json.as_unsigned, parameter)
        elif key == "binary_data_output":
            head.binary_output = _parse_field(key, json.as_bool, parameter)
        elif key.startswith("triton_"):
            raise invalid_argument(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should"
                " not be specified."
            )
        else:
            head.parameters[json.as_text(key)] = custom_parameter(key, parameter)


def _parse_correlation_id(value: Any) -> int | str:
    if json.is_unsigned(value):
        return int(value)
    return checked_correlation_text(_parse_field("sequence_id", json.as_text, value))


def custom_parameter(key: str, value: Any) -> Parameter:
    """Returns a custom parameter. Raises HostError INVALID_ARG for an unsupported type."""
    if type(value) is str:
        return json.as_text(value)
    if type(value) is bool or json.is_signed(value):
        return bool(value) if type(value) is bool else int(value)
    if type(value) in (int, float):
        try:
            return float(value)
        except OverflowError:
            raise internal(
                "failed to parse the request JSON buffer: Number too big to be stored in double."
            ) from None
    raise invalid_argument(
        f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
    )


def _parse_member(owner: Any, name: str) -> Any:
    return _parse_field(name, lambda owner: json.member(owner, name), owner)


def _parse_field(name: str, convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value)
    except HostError as error:
        raise json.with_context(f"Unable to parse '{name}'", error) from None
