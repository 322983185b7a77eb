"""The HTTP codec, compared with tritonclient and tested with arbitrary bytes."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.http as httpclient
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tritonclient.grpc import model_config_pb2
from tritonclient.http._utils import _get_inference_request
from tritonclient.utils import np_to_triton_dtype

from host.errors import HostError
from host.frontends.compression import choose_encoding, compress, decompress
from host.frontends.http import generate, json_reader, json_text
from host.frontends.http import tensors as http_tensors
from host.frontends.http.admin import trace_change
from host.frontends.http.http_exchange import HttpExchange
from host.frontends.http.infer_endpoint import raw_request, to_request
from host.frontends.http.inference_header import InferenceHeader, InferenceHeaderReader
from host.frontends.http.routes import find_route
from host.frontends.http.tensors import encode_infer_response, run_in_turns
from host.frontends.receive_memory import ReceiveBudget, ReservedBytes
from host.inference.request import InferRequest, InferResponse, Tensor
from host.instances.regions import Regions

MOST = 1 << 20
NO_REGIONS = Regions(None)

NUMBERS = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]
AS_JSON = [kind for kind in NUMBERS if kind != "f2"]

Array = npt.NDArray[Any]

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


def shapes(least: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    return arrays.array_shapes(min_dims=1, max_dims=3, min_side=least, max_side=4)


def of_numbers(kinds: list[str], least: int = 0) -> st.SearchStrategy[Array]:
    return st.sampled_from(kinds).flatmap(lambda kind: arrays.arrays(kind, shapes(least)))


def of_strings(elements: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[Array]:
    return arrays.arrays(np.object_, shapes(least), elements=elements, fill=st.nothing())


texts = st.text(st.characters(codec="utf-8"), max_size=8)
in_json = of_numbers(AS_JSON, 1) | of_strings(texts, 1)
in_bytes = of_numbers(NUMBERS) | of_strings(st.binary(max_size=8))


def decode(body: bytes, length: int | None = None) -> InferRequest:
    """Decodes a body whose JSON part has this length."""
    begin = len(body) if length is None else length
    head = InferenceHeaderReader(MOST).read(body[:begin])
    return to_request(head, "m", 1, body, begin, NO_REGIONS)


def array_of(tensor: Tensor) -> Array:
    """Returns the array of a tensor."""
    data = bytes(tensor.data)
    if tensor.datatype == "BYTES":
        elements, at = [], 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "little")
            elements.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        array: Array = np.empty(len(elements), np.object_)
        array[:] = elements
        return array.reshape(tensor.shape)
    kind = {"BOOL": "bool", "FP16": "f2", "FP32": "f4", "FP64": "f8"}.get(tensor.datatype)
    return np.frombuffer(data, kind or tensor.datatype.lower()).reshape(tensor.shape)


def as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def assert_same(found: Array, expected: Array) -> None:
    assert found.shape == expected.shape
    if expected.dtype == np.object_:
        assert [as_bytes(e) for e in found.ravel()] == [as_bytes(e) for e in expected.ravel()]
    else:
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


# Requests of tritonclient

sent = st.tuples(in_json, st.just(False)) | st.tuples(in_bytes, st.just(True))


def written(inputs: list[tuple[Array, bool]], **options: Any) -> tuple[bytes, int | None]:
    """Returns a request of tritonclient and the length of its JSON part.

    The second value of each input selects binary data.
    """
    tensors = []
    for index, (array, binary) in enumerate(inputs):
        tensor = httpclient.InferInput(str(index), array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array, binary_data=binary)
        tensors.append(tensor)
    defaults = {
        "outputs": None,
        "request_id": "",
        "sequence_id": 0,
        "sequence_start": False,
        "sequence_end": False,
        "priority": 0,
        "timeout": None,
        "custom_parameters": None,
    }
    body, length = _get_inference_request(inputs=tensors, **{**defaults, **options})
    return body if isinstance(body, bytes) else body.encode(), length


@given(st.lists(sent, max_size=4))
def test_arrays_that_the_client_sends_arrive(inputs: list[tuple[Array, bool]]) -> None:
    request = decode(*written(inputs))
    assert [tensor.name for tensor in request.inputs] == [str(i) for i in range(len(inputs))]
    for tensor, (array, _) in zip(request.inputs, inputs, strict=True):
        assert tensor.datatype == np_to_triton_dtype(array.dtype)
        assert_same(array_of(tensor), array)


@given(
    texts,
    st.integers(0, 2**64 - 1) | texts.filter(bool),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2**63 - 1),
    st.integers(1, 2**63 - 1),
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3),
        texts | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False),
        max_size=3,
    ),
)
def test_request_options_round_trip(
    id: str,
    sequence: int | str,
    start: bool,
    end: bool,
    priority: int,
    timeout: int,
    custom: dict[str, Any],
) -> None:
    body, length = written(
        [(np.ones(1, np.float32), True)],
        request_id=id,
        sequence_id=sequence,
        sequence_start=start,
        sequence_end=end,
        priority=priority,
        timeout=timeout,
        custom_parameters=custom,
    )
    request = decode(body, length)
    assert request.id == id
    # The client does not send the flags otherwise.
    flags = (1 * start) | (2 * end) if sequence not in (0, "") else 0
    assert (request.correlation_id, request.flags) == (sequence, flags)
    assert (request.priority, request.timeout_us) == (priority, timeout)
    assert request.parameters == custom


# Requests in any valid form


@st.composite
def nested(draw: st.DrawFn, values: list[Any]) -> list[Any]:
    """Puts the values in order into arrays of any nesting."""
    if not values or draw(st.integers(0, 3)) == 0:
        return values
    parts: list[Any] = []
    at = 0
    while at < len(values):
        size = draw(st.integers(1, len(values) - at))
        part = values[at : at + size]
        parts += part if draw(st.booleans()) else [draw(nested(part)) if size > 1 else part]
        at += size
    return parts


@given(in_json, st.data())
def test_json_arrays_may_be_nested_in_any_way(array: Array, data: st.DataObject) -> None:
    values = data.draw(nested(array.ravel().tolist()))
    entry: dict[str, object] = {"shape": list(array.shape), "data": values}
    entry |= {"name": "x", "datatype": np_to_triton_dtype(array.dtype)}
    indent = data.draw(st.sampled_from([None, 0, 2]))
    ascii_only = data.draw(st.booleans())
    body = json.dumps({"inputs": [entry]}, indent=indent, ensure_ascii=ascii_only).encode()
    (tensor,) = decode(body).inputs
    assert_same(array_of(tensor), array)


@given(of_numbers(NUMBERS, 1), st.integers(0, 2), st.booleans())
def test_a_raw_tensor_body_gets_its_shape(array: Array, variable: int, batch: bool) -> None:
    dims = list(array.shape)
    dims[min(variable, len(dims) - 1)] = -1
    kind = model_config_pb2.DataType.Value(f"TYPE_{np_to_triton_dtype(array.dtype)}")
    config = model_config_pb2.ModelConfig(name="m", max_batch_size=int(batch))
    config.input.add(name="x", data_type=kind, dims=dims)
    (tensor,) = raw_request(config, 1, array.tobytes(), MOST).inputs
    assert tensor.shape == [1] * batch + list(array.shape)
    assert_same(array_of(tensor), array.reshape(tensor.shape))


# Responses, read by tritonclient


@given(
    st.lists(sent, max_size=4),
    texts,
    st.dictionaries(st.text("abc"), texts | st.booleans() | st.integers(-(2**63), 2**63 - 1)),
)
def test_the_client_decodes_the_arrays_of_a_response(
    outputs: list[tuple[Array, bool]], id: str, parameters: dict[str, Any]
) -> None:
    made = decode(*written([(array, True) for array, _ in outputs])).inputs
    binary = [str(index) for index, (_, as_binary) in enumerate(outputs) if as_binary]
    response = InferResponse("m", 3, id, made, parameters=parameters)
    head, chunks = asyncio.run(run_in_turns(encode_infer_response(response, binary, ())))
    body = b"".join([head, *chunks])
    # The length header is sent only if binary data follows.
    length = len(head) if chunks else None
    result = httpclient.InferResult.from_response_body(body, False, length)
    about = result.get_response()
    assert (about["model_name"], about["model_version"]) == ("m", "3")
    assert (about.get("id", ""), about.get("parameters", {})) == (id, parameters)
    for index, (array, _) in enumerate(outputs):
        if chunks or array.size:  # without binary data, the client does not read any
            assert_same(result.as_numpy(str(index)), array)


@given(st.lists(in_json, min_size=1, max_size=3))
def test_a_response_does_not_depend_on_its_steps(outputs: list[Array]) -> None:
    made = decode(*written([(array, True) for array in outputs])).inputs
    response = InferResponse("m", 3, "", made)

    def encoded(elements: int) -> tuple[int, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http_tensors, "PIECE_ELEMENTS", elements)
            steps, pauses = encode_infer_response(response, (), ()), 0
            while True:
                try:
                    next(steps)
                except StopIteration as done:
                    return pauses, json.loads(done.value[0].decode("latin-1"))
                pauses += 1

    pauses, found = encoded(2)
    assert pauses == sum(max(0, (array.size + 1) // 2 - 1) for array in outputs)
    assert repr((0, found)) == repr(encoded(1 << 20))  # NaN is not equal to itself


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_numbers_are_written_with_as_few_digits_as_they_need(numbers: list[float]) -> None:
    text = json_text.dump_numbers(np.array(numbers, np.float64)).decode()
    assert json.loads(text) == numbers
    assert "+" not in text
    for digits, number in zip(text[1:-1].split(","), numbers, strict=False):
        assert Decimal(digits) == Decimal(repr(number))  # which has as few as it needs
        assert "." in digits or "e" in digits


@pytest.mark.parametrize("beside", [[], [math.nan], [math.inf, -math.inf]], ids=str)
@pytest.mark.parametrize(
    ("number", "text"),  # the texts of Triton 2.51
    [
        (1e15, "1000000000000000.0"),
        (1e16, "10000000000000000.0"),
        (1.5e17, "150000000000000000.0"),
        (1.2345678901234568e17, "123456789012345680.0"),
        (1e20, "100000000000000000000.0"),
        (1.2345678901234568e20, "123456789012345680000.0"),
        (1e21, "1e21"),
        (1.7e22, "1.7e22"),
        (1e160, "1e160"),
        (0.001, "0.001"),
        (1e-5, "0.00001"),
        (1e-6, "0.000001"),
        (1.25e-6, "0.00000125"),
        (-2.5e-6, "-0.0000025"),
        (9.5e-7, "9.5e-7"),
        (1e-60, "1e-60"),
        (5e-324, "5e-324"),
        (-0.0, "-0.0"),
    ],
)
def test_numbers_are_written_as_triton_does(number: float, text: str, beside: list[float]) -> None:
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    written = json_text.dump_numbers(np.array([number, *beside, number], np.float64))
    assert written.decode() == f"[{','.join([text, *(names[str(one)] for one in beside), text])}]"


def triton_text(number: float) -> str:
    """The text of a number in the JSON of Triton."""
    if not math.isfinite(number):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(number)]
    exact = Decimal(repr(number))
    if number and not 1e-6 <= abs(number) < 1e21:
        sign, digits, _ = exact.normalize().as_tuple()
        first, *rest = map(str, digits)
        fraction = f".{''.join(rest)}" if rest else ""
        return f"{'-' * sign}{first}{fraction}e{exact.adjusted()}"
    text = f"{exact:f}"
    return text if "." in text else f"{text}.0"


near_exponents = st.builds(  # where the texts of Triton and of orjson differ
    lambda sign, digits, exponent: float(f"{sign}{digits}e{exponent}"),
    st.sampled_from(["", "-"]),
    st.integers(1, 9) | st.floats(1, 9.9),
    st.sampled_from([-60, -7, -6, -5, 15, 16, 17, 18, 19, 20, 21, 160, 200]),
)


@given(
    st.sampled_from(["f2", "f4", "f8"]),
    st.lists(st.floats() | near_exponents | st.sampled_from([0.5, -0.0, math.nan, -math.inf])),
)
def test_arrays_have_the_text_that_triton_gives_each_number(kind: str, given: list[float]) -> None:
    with np.errstate(over="ignore"):
        numbers = np.array(given).astype(kind).astype(np.float64)
    expected = ",".join(map(triton_text, numbers.tolist()))
    assert json_text.dump_numbers(numbers).decode() == f"[{expected}]"


# Arbitrary bytes

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["FP32", "BYTES", "INT8", "FP16", "x", "inputs"])
)
documents = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                "id inputs outputs parameters name shape datatype data binary_data_size binary_data"
                " classification shared_memory_region shared_memory_offset sequence_id priority"
                " binary_data_output triton_x x".split()
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
valid = st.lists(sent, min_size=1, max_size=2).map(written)


def decoded_or_refused(body: bytes, length: int | None = None) -> None:
    """Documented errors are accepted; any other exception fails the test."""
    try:
        assert isinstance(decode(body, length), InferRequest)
    except HostError as error:
        assert error.message
        error.message.encode()


@given(documents)
def test_any_document_is_parsed_or_rejected(document: Any) -> None:
    decoded_or_refused(json.dumps(document).encode())
    decoded_or_refused(json.dumps({"inputs": [document]}).encode())


@given(st.fixed_dictionaries({"name": st.just("x")}, optional={
    "shape": documents, "datatype": documents, "data": documents, "parameters": documents,
}), documents, documents)  # fmt: skip
def test_any_member_is_parsed_or_rejected(entry: Any, outputs: Any, parameters: Any) -> None:
    document = {"inputs": [entry], "outputs": [{"name": "y", "parameters": outputs}]}
    decoded_or_refused(json.dumps(document | {"parameters": parameters}).encode())


@given(valid, st.data())
def test_a_damaged_request_is_parsed_or_rejected(
    request: tuple[bytes, int | None], data: st.DataObject
) -> None:
    body, length = request
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for some in (bytes(damaged), cut, cut + b"\0" * 5):
        at = length if length is None else min(length, len(some))
        decoded_or_refused(some, at)
        decoded_or_refused(some, data.draw(st.integers(1, max(1, len(some)))))


@pytest.mark.parametrize("values", [10, 1000])
def test_requests_have_a_shape_to_recognise_if_their_json_comes_again(values: int) -> None:
    """Long JSON holds the data of its inputs, and is not kept."""
    entry = {"name": "x", "datatype": "INT32", "shape": [values], "data": [1] * values}
    body = json.dumps({"inputs": [entry]}).encode()
    reader = InferenceHeaderReader(MOST)
    shapes = [
        to_request(reader.read(body), "m", 1, body, len(body), NO_REGIONS).shape for _ in range(3)
    ]
    assert shapes[0] is None
    assert (shapes[1] is not None) == (values == 10)
    assert shapes[1] is shapes[2]


@given(st.binary(max_size=50))
def test_any_bytes_are_parsed_or_rejected(body: bytes) -> None:
    decoded_or_refused(body)


flat = model_config_pb2.ModelConfig(name="m", max_batch_size=4)
for _name, _kind in (("x", "FP32"), ("data", "STRING"), ("name", "INT8"), ("shape", "FP16")):
    flat.input.add(name=_name, data_type=f"TYPE_{_kind}", dims=[-1])


@given(documents, st.binary(max_size=20))
def test_generate_parses_or_rejects_any_document(document: Any, rubbish: bytes) -> None:
    for text in (json.dumps(document).encode(), rubbish):
        try:
            assert isinstance(generate.to_request(flat, 1, text, MOST), InferRequest)
        except HostError as error:
            error.message.encode()


@given(
    st.dictionaries(
        st.sampled_from(["trace_level", "trace_rate", "trace_count", "log_frequency"]),
        documents | st.text("0123456789-+_ ٢", max_size=12),
    )
)
def test_trace_settings_are_parsed_or_rejected(document: dict[str, Any]) -> None:
    try:
        trace_change(document)
    except HostError as error:
        error.message.encode()


# JSON


of_64_bits = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts
exact = st.recursive(
    of_64_bits, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20
)


@given(exact)
def test_both_readers_read_what_python_reads(document: Any) -> None:
    text = json.dumps(document).encode()
    expected = repr(json.loads(text))  # NaN is not equal to itself
    assert repr(json_text.parse(text)) == expected
    assert repr(json_reader.read(text)) == expected


number_texts = st.sampled_from(
    ["0", "-0", "1.0", "-0.0", "1E5", "5e-324", "3.4028235677973366e38", "3.5e38", "1e400", "true"]
    + ["null", "[1]", str(2**63), str(2**64), "-" + "1" * 400, "16777217", "1e-46", '"1"', "01"]
) | st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr)  # fmt: skip


def members(*texts: str) -> st.SearchStrategy[str]:
    """The text of an object with some of these members, in any order, and repeated at times."""
    some = st.lists(st.sampled_from(texts), max_size=5)
    return some.map(lambda chosen: "{" + ",".join(chosen) + "}")


sources = members(
    *('"binary_data_size":8', '"binary_data_size":0', '"binary_data_size":null', '"x":1'),
    *('"shared_memory_region":"r"', '"shared_memory_region":""', '"shared_memory_offset":4'),
    *('"shared_memory_byte_size":8', f'"shared_memory_byte_size":{2**63}'),
)
formats = members(
    *('"binary_data":true', '"binary_data":false', '"binary_data":0', '"classification":2'),
    *('"classification":0', '"classification":-1', '"shared_memory_region":"r"'),
)
request_parameters = members(
    *('"binary_data_output":true', '"sequence_id":7', '"sequence_id":"a:b"', '"sequence_end":true'),
    *(
        '"priority":1',
        '"timeout":-1',
        '"triton_x":1',
        '"x":2',
        '"x":2.5',
        '"x":"\u00e9"',
        '"y":[1]',
    ),
)
input_members = st.lists(
    st.sampled_from(['"name":"x"', '"datatype":"FP32"', '"shape":[2]', '"data":[1,2.5]'])
    | st.sampled_from(['"shape":[-1]', f'"shape":[{2**63}]', '"shape":[]', '"name":1', '"more":3'])
    | st.sampled_from(
        ['"datatype":"FP16"', '"datatype":"a:b"', '"name":"\\u0061"', '"data":[[1],2]']
    )
    | sources.map('"parameters":'.__add__),
    max_size=3,
)
outputs = st.lists(
    members('"name":"y"', '"name":"z"', '"name":1')
    | formats.map(lambda form: f'{{"name":"y","parameters":{form}}}'),
    max_size=2,
)


def outcome(read: Callable[[bytes], InferenceHeader], text: bytes) -> object:
    """What is read from a JSON part, or the error."""
    try:
        return repr(read(text))
    except HostError as error:
        return error.code, error.message


def read_in_both_ways(text: bytes) -> None:
    """Texts of usual requests are read by another parser than all others."""
    reader = InferenceHeaderReader(MOST)
    assert outcome(reader.read, text) == outcome(reader.read_large, text)


@example("FP32", ["1", "-" + "1" * 400], "", "")
@example("FP32", ["1", "3.5e38"], "", "")
@given(
    st.sampled_from(["FP32", "FP64", "INT64", "UINT8", "BOOL", "BYTES", "FP16"]),
    st.lists(number_texts, max_size=4),
    st.sampled_from(["", ',"id":"a"', ',"id":"a:b"', ',"id":1', ',"x":{}', ',"inputs":[]']),
    st.sampled_from(["", ',"parameters":{"a":1}', ',"data":[2]', ',"more":3', ',"name":"y"']),
)
def test_flat_numbers_are_read_as_any_others(
    datatype: str, numbers: list[str], more: str, of_input: str
) -> None:
    values = f'"shape":[{len(numbers)}],"data":[{",".join(numbers)}]'
    entry = f'{{"name":"x","datatype":"{datatype}",{values}{of_input}}}'
    read_in_both_ways(f'{{"inputs":[{entry}]{more}}}'.encode())


@given(
    sources,
    input_members,
    outputs,
    request_parameters,
    st.sampled_from(["", '"id":"a",', '"id":"",', '"outputs":[],', '"parameters":{},', '"x":1,']),
)
def test_usual_requests_are_read_as_any_others(
    source: str, more: list[str], outputs: list[str], parameters: str, first: str
) -> None:
    usual = ['"name":"x"', '"shape":[2]', '"datatype":"FP32"', f'"parameters":{source}']
    for members_of_input in (usual, more, [*usual, *more]):
        entry = "{" + ",".join(members_of_input) + "}"
        rest = f'"outputs":[{",".join(outputs)}],"parameters":{parameters}'
        read_in_both_ways(f'{{{first}"inputs":[{entry}],{rest}}}'.encode())
        read_in_both_ways(f'{{{first}"inputs":[{entry}]}}'.encode())


@pytest.mark.parametrize("kind", ["inputs", "outputs", "parameters"])
def test_too_many_inputs_outputs_or_parameters_are_refused(kind: str) -> None:
    entry = {"name": "x", "shape": [0], "datatype": "FP32", "data": []}
    many = {
        "inputs": [entry] * 2049,
        "outputs": [{"name": "y"}] * 2049,
        "parameters": dict.fromkeys(map(str, range(2049)), 1),
    }
    body = json.dumps({"inputs": [entry], kind: many[kind]}).encode()
    with pytest.raises(HostError, match=f"expected at most 2048 '{kind}' in the request JSON"):
        decode(body)


@given(documents)
def test_any_document_is_read_in_one_way(document: Any) -> None:
    for value in (document, {"inputs": [document]}):
        read_in_both_ways(json.dumps(value).encode())


def test_requests_of_clients_need_no_general_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(json_text, "parse")
    inputs: list[tuple[Array, bool]] = [
        (np.ones(3, np.float32), False),
        (np.ones(2, np.int64), True),
    ]
    output = httpclient.InferRequestedOutput("y", binary_data=True, class_count=2)
    for options in ({"request_id": "a"}, {"outputs": [output]}, {"custom_parameters": {"x": 2}}):
        request = decode(*written(inputs, **options))
        assert [tensor.shape for tensor in request.inputs] == [[3], [2]]


def test_a_request_is_read_again_after_another_one() -> None:
    reader = InferenceHeaderReader(MOST)
    bodies = [written([(np.full(2, value, np.float32), False)])[0] for value in (1, 2)]
    for body in (*bodies, *bodies[::-1]):
        assert reader.read(body).inputs == reader.read_large(body).inputs


# Paths and headers


@given(st.binary(max_size=60), st.sampled_from([b"/v2/models/", b"/v2/", b""]))
def test_any_path_has_a_route_or_none(path: bytes, beginning: bytes) -> None:
    route = find_route(beginning + path)
    if route is not None:
        route.resource.encode()
        assert not route.version or int(route.version) >= 0


@given(st.binary(max_size=30) | st.integers().map(lambda number: b"%d" % number))
def test_any_content_length_is_parsed_or_rejected(value: bytes) -> None:
    scope = {"method": "POST", "headers": [(b"content-length", value)]}
    exchange = HttpExchange(
        scope,
        None,  # type: ignore[arg-type]  # only headers are read
        None,  # type: ignore[arg-type]
        ReceiveBudget(),
    )
    try:
        length = exchange.content_length()
    except HostError as error:
        assert error.message.startswith("Unable to parse Content-Length, ")
    else:
        assert length == int(value.decode("latin-1"))


@given(
    st.binary(max_size=40) | st.from_regex(rb"(gzip|deflate|\*|;|q=|[0-9.,; ])*", fullmatch=True)
)
def test_any_accept_encoding_has_a_chosen_encoding(value: bytes) -> None:
    assert choose_encoding(value) in ("", "gzip", "deflate")


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=300)), st.sampled_from(["gzip", "deflate"]))
def test_compression_round_trip(parts: list[bytes], encoding: str) -> None:
    async def both() -> bytes:
        packed = await compress(parts, encoding)
        return await decompress(packed, 1 << 20, ReservedBytes(ReceiveBudget()))

    assert asyncio.run(both()) == b"".join(parts)


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_an_integer_without_a_double_is_refused(datatype: str) -> None:
    with pytest.raises(HostError, match="Number too big to be stored in double"):
        http_tensors.read_numbers(datatype, [1, 10**400])
