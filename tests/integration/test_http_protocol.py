"""HTTP requests and their exact responses (docs/reference/http.md,
docs/reference/protocol.md, "Shared memory",
docs/reference/metrics.md, "Statistics" and "Tracing and logging").
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from tests.clients import check_binary_outputs
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve

BATCHED = """
backend: "python"
max_batch_size: 4
input [
  { name: "X" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] optional: true }
]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" } ]
"""
DOUBLING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(r, "X").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", 2 * t)]) for t in tensors]
"""
HALF = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(1, np.float16))])
            for _ in requests
        ]
"""
HALF_CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP16 dims: [ -1, -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP16 dims: [ 1 ] } ]
"""

BUSY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            "nv_trt_llm_kv_cache_block_metrics", "Blocks", pb_utils.MetricFamily.GAUGE
        )
        for kind, number in (("tokens_per", 64), ("used", 3), ("max", 8)):
            self.family.Metric({"kv_cache_block_type": kind}).set(number)

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", t)]) for t in tensors]
"""
BUSY_CONFIG = """
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""

MISMATCH = "[request id: <id_unknown>] "
NO_JSON = "failed to parse the request JSON buffer: "


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("identity", "stream")
    module_repository.add("batched", DOUBLING, BATCHED, files={"labels.txt": "zero\none\n"})
    module_repository.add("half", HALF, HALF_CONFIG)
    module_repository.add("busy", BUSY, BUSY_CONFIG)
    module_repository.add("words", DOUBLING, BUSY_CONFIG.replace("FP32", "STRING"))
    module_repository.add("gone", DOUBLING, BATCHED, files={"labels.txt": "zero\none\n"})
    host = module_serve(
        module_repository,
        "--model-control-mode=explicit",
        "--load-model=*",
        "--allow-client-shm=true",
        "--log-verbose=0",
    ).wait_started()
    assert send_request(host, "POST", "/v2/repository/models/gone/unload") == (200, "")
    host.wait_for("successfully unloaded 'gone'")
    return host


def send_request(
    host: RunningHost, method: str, path: str, body: bytes = b"", **headers: str
) -> Answer:
    """Returns status and text of the response."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        connection.request(method, path, body, names)
        response = connection.getresponse()
        return response.status, response.read().decode()


Answer = tuple[int, str]


def error(text: str) -> str:
    return json.dumps({"error": text}, separators=(",", ":"), ensure_ascii=False)


# Paths and methods (1.1 to 1.5, 5.3, 7)

NOT_FOUND = error("Not Found")
NOT_ALLOWED = error("Method Not Allowed")
UNKNOWN = "Request for unknown model: "

ASKED: dict[str, tuple[int, str]] = {
    "GET /v2/health/live": (200, ""),
    "GET /v2/health/ready": (200, ""),
    "GET /v2/health/live?pretty=1": (200, ""),
    "GET /v2/health/live#top": (404, NOT_FOUND),
    "GET /v2/health/live/": (404, NOT_FOUND),
    "GET /v2/models/iden#tity": (404, error(UNKNOWN + "'iden#tity' is not found")),
    "GET /v2/": (404, NOT_FOUND),
    "GET /": (307, ""),
    "GET /v2/models": (404, NOT_FOUND),
    "GET /v2/models/": (404, NOT_FOUND),
    "GET /v2/models/identity/": (404, NOT_FOUND),
    "GET /v2/models/identity/versions/x": (404, NOT_FOUND),
    "GET /v2/models/identity/versions/1/trace/setting": (404, NOT_FOUND),
    "POST /v2/health/live": (405, NOT_ALLOWED),
    "PUT /v2/health/live": (405, NOT_ALLOWED),
    "BREW /v2/health/live": (405, NOT_ALLOWED),
    "BREW /v2/coffee": (404, NOT_FOUND),
    "DELETE /v2/models/identity": (405, NOT_ALLOWED),
    "OPTIONS /v2": (405, NOT_ALLOWED),
    "GET /v2/models/identity/infer": (405, NOT_ALLOWED),
    "GET /v2/repository/index": (405, NOT_ALLOWED),
    "POST /v2/models/identity/config": (405, NOT_ALLOWED),
    "GET /v2/models/identity/ready": (200, ""),
    "GET /v2/models/identity/versions/1/ready": (200, ""),
    "GET /v2/models/id%65ntity/ready": (200, ""),
    "GET /v2/models/identity/versions/2/ready": (
        404,
        error(UNKNOWN + "'identity' version 2 is not found"),
    ),
    "GET /v2/models/identity/versions/0": (
        404,
        error(UNKNOWN + "'identity' version 0 is not found"),
    ),
    "GET /v2/models/identity/versions/99999999999999999999": (
        400,
        error(
            "failed to get model version from specified version string '99999999999999999999'"
            " (details: stol), version should be an integral value > 0"
        ),
    ),
    "GET /v2/models/missing/ready": (404, error(UNKNOWN + "'missing' is not found")),
    "GET /v2/models/missing": (404, error(UNKNOWN + "'missing' is not found")),
    "GET /v2/models/missing/config": (404, error(UNKNOWN + "'missing' is not found")),
    "GET /v2/models/gone/ready": (404, error(UNKNOWN + "'gone' has no available versions")),
    "GET /v2/models/gone/versions/1/ready": (
        503,
        error(UNKNOWN + "'gone' version 1 is not at ready state"),
    ),
    "GET /v2/models/batched": (
        200,
        (
            '{"name":"batched","versions":["1"],"platform":"python","inputs":['
            '{"name":"X","datatype":"FP32","shape":[-1,2]},'
            '{"name":"TEXT","datatype":"BYTES","shape":[-1,-1]}],"outputs":['
            '{"name":"Y","datatype":"FP32","shape":[-1,2]}]}'
        ),
    ),
    "GET /v2/models/stats/config": (404, error(UNKNOWN + "'stats' is not found")),
    "GET /v2/models/missing/stats": (400, error("requested model 'missing' is not available")),
    "GET /v2/models/gone/stats": (400, error("requested model 'gone' is not available")),
    "GET /v2/models/gone/versions/1/stats": (
        400,
        error("requested model 'gone' is not available"),
    ),
    "GET /v2/models/identity/versions/3/stats": (
        400,
        error("requested model version is not available for model 'identity'"),
    ),
    "GET /v2/models/missing/trace/setting": (400, error("Request for unknown model : missing")),
    "POST /v2/models/missing/trace/setting": (400, error("Request for unknown model : missing")),
    "GET /v2/models/gone/trace/setting": (400, error("Request for unknown model : gone")),
    "GET /v2/trace/setting": (
        200,
        (
            '{"trace_level":["OFF"],"trace_rate":"1000","trace_count":"-1","log_frequency":"0",'
            '"trace_file":"","trace_mode":"triton"}'
        ),
    ),
    "GET /v2/logging": (
        200,
        (
            '{"log_file":"","log_info":true,"log_warning":true,"log_error":true,'
            '"log_verbose_level":0,"log_format":"default"}'
        ),
    ),
    "GET /v2/systemsharedmemory/status": (200, "[]"),
    "GET /v2/systemsharedmemory/region/x/status": (
        404,
        error("Unable to find system shared memory region: 'x'"),
    ),
    "GET /v2/cudasharedmemory/status": (200, "[]"),
    "GET /v2/cudasharedmemory/region/x/status": (
        404,
        error("Unable to find cuda shared memory region: 'x'"),
    ),
}


@pytest.mark.parametrize("line", ASKED)
def test_each_path_has_its_response(host: RunningHost, line: str) -> None:
    method, path = line.split(" ")
    assert send_request(host, method, path) == ASKED[line]


def test_a_path_may_have_bytes_that_are_not_ascii(host: RunningHost) -> None:
    address, port = host.http_url.split(":")
    with socket.create_connection((address, int(port)), DEADLINE) as client:
        client.sendall("GET /v2/models/modèle HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        with closing(http.client.HTTPResponse(client)) as response:
            response.begin()
            assert response.status == 404
            assert response.read().decode() == error(UNKNOWN + "'modèle' is not found")


# Requests that change something (1.5, 4, 7)

INDEX = (
    '[{"name":"batched","version":"1","state":"READY"},'
    '{"name":"busy","version":"1","state":"READY"},'
    '{"name":"gone","version":"1","state":"UNAVAILABLE","reason":"unloaded"},'
    '{"name":"half","version":"1","state":"READY"},'
    '{"name":"identity","version":"1","state":"READY"},'
    '{"name":"stream","version":"1","state":"READY"},'
    '{"name":"words","version":"1","state":"READY"}]'
)
INDEX_READY = INDEX.replace(
    '{"name":"gone","version":"1","state":"UNAVAILABLE","reason":"unloaded"},', ""
)
LOAD = "/v2/repository/models/missing/load"
UNLOAD = "/v2/repository/models/missing/unload"
IN_REPOSITORY = "/v2/repository/r/models/identity/"
NO_REPOSITORIES = error("'repository_name' specification is not supported")
NOT_POLLED = error("failed to load 'missing', failed to poll from model repository")
TRACE = "/v2/trace/setting"
REGION = "/v2/systemsharedmemory/region/r/register"
CUDA = "/v2/cudasharedmemory/region/r/register"

POSTED: dict[str, tuple[str, str, int, str]] = {
    "the index": ("/v2/repository/index", "", 200, INDEX),
    "the index of some repository": ("/v2/repository/x/index", "{}", 200, INDEX),
    "what is ready": ("/v2/repository/index", '{"ready":true}', 200, INDEX_READY),
    "what is what": (
        "/v2/repository/index",
        '{"ready":7}',
        400,
        error("Invalid value for 'ready': expected a boolean"),
    ),
    "a load of missing": (LOAD, "", 500, NOT_POLLED),
    "a load again": ("/v2/repository/models/identity/load", "", 200, ""),
    "a load with rubbish": (
        LOAD,
        "{",
        500,
        error(NO_JSON + "Missing a name for object member. at 1"),
    ),
    "a load with a parameter": (
        LOAD,
        '{"parameters":{"x":"y"}}',
        500,
        error("unexpected error on creating Triton parameter"),
    ),
    "a load with a number": (
        LOAD,
        '{"parameters":{"config":7}}',
        500,
        error("attempt to access JSON non-string as string"),
    ),
    "a load with a file only": (LOAD, '{"parameters":{"file:1/model.py":"eA=="}}', 500, NOT_POLLED),
    "a load with half a configuration": (LOAD, '{"parameters":{"config":"{"}}', 500, NOT_POLLED),
    "a load from elsewhere": (
        "/v2/repository/models/..%2Fx/load",
        "",
        400,
        error("invalid model name '../x', model name must not contain path traversal characters"),
    ),
    "a load from a repository by name": (IN_REPOSITORY + "load", "", 501, NO_REPOSITORIES),
    "an unload from a repository by name": (IN_REPOSITORY + "unload", "", 501, NO_REPOSITORIES),
    "a body with the end of a text in C": (UNLOAD, "{}\0", 200, ""),
    "an unload of missing": (UNLOAD, "", 200, ""),
    "an unload of dependents": (UNLOAD, '{"parameters":{"unload_dependents":true}}', 200, ""),
    "an unload of what": (
        UNLOAD,
        '{"parameters":{"unload_dependents":7}}',
        500,
        error("attempt to access JSON non-boolean as boolean"),
    ),
    "settings of nothing": (TRACE, "", 500, error(NO_JSON + "The document is empty. at 0")),
    "a rate that is no text": (
        TRACE,
        '{"trace_rate":7}',
        500,
        error("attempt to access JSON non-string as string"),
    ),
    "a rate that is no number": (
        TRACE,
        '{"trace_rate":"x"}',
        400,
        error("Unable to parse 'trace_rate', got: x"),
    ),
    "a count that is too low": (
        TRACE,
        '{"trace_count":"-2"}',
        400,
        error("Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
    ),
    "a count that is too high": (
        TRACE,
        '{"trace_count":"99999999999"}',
        400,
        error(
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got:"
            " 99999999999"
        ),
    ),
    "no level among others": (
        TRACE,
        '{"trace_level":["OFF","TIMESTAMPS"]}',
        400,
        error("Expect only one trace level 'OFF' is specified"),
    ),
    "levels that are no array": (
        TRACE,
        '{"trace_level":false}',
        500,
        error("attempt to access JSON non-array as array"),
    ),
    "traces without a file": (
        TRACE,
        '{"trace_level":["TIMESTAMPS"]}',
        400,
        error("Attempting to set invalid trace setting :trace file name is not given"),
    ),
    "another file of traces": (
        TRACE,
        '{"trace_file":"x"}',
        501,
        error("trace file location can not be updated through network protocol"),
    ),
    "a switch that is none": (
        "/v2/logging",
        '{"log_info":1}',
        500,
        error("attempt to access JSON non-boolean as boolean"),
    ),
    "a level that is none": (
        "/v2/logging",
        '{"log_verbose_level":-1}',
        500,
        error("attempt to access JSON non-unsigned-integer as unsigned-integer"),
    ),
    "another format": (
        "/v2/logging",
        '{"log_format":"x"}',
        503,
        error("invalid argument for --log_format, got: x"),
    ),
    "another log": (
        "/v2/logging",
        '{"log_file":"x"}',
        501,
        error("log file location can not be updated through network protocol"),
    ),
    "a region without a name": (
        "/v2/systemsharedmemory/register",
        "{}",
        400,
        error("'region name' is necessary to register system shared memory region"),
    ),
    "a region without a key": (
        REGION,
        "{}",
        400,
        error("Shared memory register request has no 'key' field"),
    ),
    "a region without a size": (
        REGION,
        '{"key":"/x"}',
        400,
        error("Shared memory register request has no 'byte_size' field"),
    ),
    "a region without memory": (
        REGION,
        '{"key":"/pbhost-missing","byte_size":4}',
        500,
        error("Unable to open shared memory region: '/pbhost-missing'"),
    ),
    "a region of slashes": (
        REGION,
        '{"key":"//","byte_size":4}',
        400,
        error("cannot register shared memory region 'r' - invalid shm key '//'"),
    ),
    "a region of the host's": (
        REGION,
        '{"key":"/triton_python_backend_shm_region_x","byte_size":4}',
        400,
        error(
            "cannot register shared memory region 'r' with key"
            " '/triton_python_backend_shm_region_x' as the key contains the reserved prefix"
            " 'triton_python_backend_shm_region_'"
        ),
    ),
    "a region that is not there": ("/v2/systemsharedmemory/region/x/unregister", "", 200, ""),
    "all regions": ("/v2/systemsharedmemory/unregister", "", 200, ""),
    "all of the GPU": ("/v2/cudasharedmemory/unregister", "", 200, ""),
    "a region of a GPU without a name": (
        "/v2/cudasharedmemory/register",
        "{}",
        400,
        error("'region name' is necessary to register cuda shared memory region"),
    ),
    "a region of a GPU without a handle": (
        CUDA,
        "{}",
        400,
        error("Shared memory register request has no 'raw_handle' field"),
    ),
    "a region of a GPU": (
        CUDA,
        '{"raw_handle":{"b64":"eA=="},"byte_size":4,"device_id":0}',
        400,
        error("failed to register CUDA shared memory region: 'r', GPUs not supported"),
    ),
}
"""Path and body of the request; status and body of the response."""


@pytest.mark.parametrize("case", POSTED)
def test_responses_to_changes(host: RunningHost, case: str) -> None:
    path, body, status, text = POSTED[case]
    assert send_request(host, "POST", path, body.encode()) == (status, text)


# Inference (1.6 to 1.8)

ONE = '{"name":"INPUT0","shape":[1],"datatype":"FP32","data":[1]}'
ANSWERED = (
    '{"model_name":"identity","model_version":"1","outputs":'
    '[{"name":"OUTPUT0","datatype":"FP32","shape":[1],"data":[1.0]}]}'
)


def wanting(output: str, request: str = "") -> str:
    """Returns a request for one output with these members."""
    return f'{{"inputs":[{ONE}],"outputs":[{{"name":"OUTPUT0","parameters":{output}}}]{request}}}'


def with_parameters(parameters: str) -> str:
    return f'{{"inputs":[{ONE}],"parameters":{parameters}}}'


INFERRED: dict[str, tuple[str, int, str]] = {
    "one number": (f'{{"inputs":[{ONE}]}}', 200, ANSWERED),
    "with a name that is ignored": (f'{{"model_name":"x","inputs":[{ONE}]}}', 200, ANSWERED),
    "with an id": (
        f'{{"id":"a","inputs":[{ONE}]}}',
        200,
        ANSWERED.replace('{"model', '{"id":"a","model', 1),
    ),
    "of a repeated member the first counts": (
        f'{{"inputs":[{ONE}],"inputs":7,"id":"","id":"b"}}',
        200,
        ANSWERED,
    ),
    "shortest decimals of doubles": (
        f'{{"inputs":[{ONE.replace("[1]}", "[0.1]}")}]}}',
        200,
        ANSWERED.replace("[1.0]", "[0.10000000149011612]"),
    ),
    "numbers that are none": (
        f'{{"inputs":[{ONE.replace("[1]", "[3]", 1).replace("[1]}", "[NaN,Inf,-Infinity]}")}]}}',
        200,
        ANSWERED.replace("[1]", "[3]").replace("[1.0]", "[NaN,Infinity,-Infinity]"),
    ),
    "an id that is a number": (
        f'{{"id":7,"inputs":[{ONE}]}}',
        500,
        error("Unable to parse 'id': attempt to access JSON non-string as string"),
    ),
    "no inputs": (
        "{}",
        500,
        error("Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
    ),
    "inputs of nothing": (
        '{"inputs":[]}',
        400,
        error(
            MISMATCH + "expected 1 inputs but got 0 inputs for model 'identity'. Got input(s) [],"
            " but missing required input(s) ['INPUT0']. Please provide all required input(s)."
        ),
    ),
    "an input twice": (
        f'{{"inputs":[{ONE},{ONE}]}}',
        400,
        error(MISMATCH + "input 'INPUT0' already exists in request"),
    ),
    "an unknown input": (
        f'{{"inputs":[{ONE.replace("INPUT0", "X")}]}}',
        400,
        error("unexpected inference input 'X' for model 'identity'"),
    ),
    "an output twice": (
        f'{{"inputs":[{ONE}],"outputs":[{{"name":"OUTPUT0"}},{{"name":"OUTPUT0"}}]}}',
        400,
        error(MISMATCH + "output 'OUTPUT0' already exists in request"),
    ),
    "an unknown output": (
        f'{{"inputs":[{ONE}],"outputs":[{{"name":"X"}}]}}',
        400,
        error("unexpected inference output 'X' for model 'identity'"),
    ),
    "an output without a name": (
        f'{{"inputs":[{ONE}],"outputs":[{{}}]}}',
        500,
        error("Unable to parse 'name': attempt to access non-existing object member 'name'"),
    ),
    "an output in a region and in classes": (
        wanting('{"shared_memory_region":"r","classification":1}'),
        400,
        error("Output can't set both 'shared_memory_region' and 'classification'"),
    ),
    "an output in a region and as bytes": (
        wanting('{"shared_memory_region":"r","binary_data":true}'),
        400,
        error("Output can't set both 'shared_memory_region' and 'binary_data'"),
    ),
    "an output in a region that is not there": (
        wanting('{"shared_memory_region":"r"}'),
        404,
        error("Unable to find shared memory region: 'r'"),
    ),
    "an output in a region without a name": (
        wanting('{"shared_memory_region":7}'),
        500,
        error(
            "Unable to parse 'shared_memory_region': attempt to access JSON non-string as string"
        ),
    ),
    "an output of bytes or not": (
        wanting('{"binary_data":1}'),
        500,
        error("Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean"),
    ),
    "less than no classes": (
        wanting('{"classification":-1}'),
        500,
        error(
            "Unable to set 'classification': attempt to access JSON non-unsigned-integer as"
            " unsigned-integer"
        ),
    ),
    "no classes": (wanting('{"classification":0}'), 200, ANSWERED),
    "an output in a region of a request for bytes": (
        wanting('{"shared_memory_region":"r"}', ',"parameters":{"binary_data_output":true}'),
        404,
        error("Unable to find shared memory region: 'r'"),
    ),
    "a request for bytes or not": (
        with_parameters('{"binary_data_output":1}'),
        500,
        error(
            "Unable to parse 'binary_data_output': attempt to access JSON non-boolean as boolean"
        ),
    ),
    "a sequence of lists": (
        with_parameters('{"sequence_id":[]}'),
        500,
        error("Unable to parse 'sequence_id': attempt to access JSON non-string as string"),
    ),
    "a long sequence": (
        with_parameters(f'{{"sequence_id":"a{"é" * 64}"}}'),
        501,
        error("string correlation ID cannot be longer than 128 characters"),
    ),
    "a start of one": (
        with_parameters('{"sequence_start":1}'),
        500,
        error("Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean"),
    ),
    "a low priority": (
        with_parameters('{"priority":-1}'),
        500,
        error(
            "Unable to parse 'priority': attempt to access JSON non-unsigned-integer as"
            " unsigned-integer"
        ),
    ),
    "a reserved parameter": (
        with_parameters('{"triton_x":1}'),
        400,
        error(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not"
            " be specified."
        ),
    ),
    "a parameter of nothing": (
        with_parameters('{"a":null}'),
        400,
        error("parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'."),
    ),
    "custom parameters": (with_parameters('{"a":1,"b":"c","c":true,"d":0.5}'), 200, ANSWERED),
    "parameters that are none": (
        with_parameters("7"),
        500,
        error("failed to get request params.: attempt to get members for non-object"),
    ),
    "an input in a region that is not there": (
        (
            '{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"FP32",'
            '"parameters":{"shared_memory_region":"r","shared_memory_byte_size":4}}]}'
        ),
        404,
        error("Unable to find shared memory region: 'r'"),
    ),
    "no source of data": (
        '{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"FP32"}]}',
        400,
        error(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in"
            " 'parameters', 'shared_memory_region' in 'parameters'. But no field is set"
        ),
    ),
    "two sources of data": (
        f'{{"inputs":[{ONE[:-1]},"parameters":{{"binary_data_size":4}}}}]}}',
        400,
        error(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in"
            " 'parameters', 'shared_memory_region' in 'parameters'. But set 'data'"
            " 'binary_data_size'"
        ),
    ),
}
"""Body of the request; status and body of the response."""


@pytest.mark.parametrize("case", INFERRED)
def test_inference_requests_are_answered_or_refused_as_by_triton(
    host: RunningHost, case: str
) -> None:
    body, status, text = INFERRED[case]
    assert send_request(host, "POST", "/v2/models/identity/infer", body.encode()) == (status, text)


def test_binary_data_of_outputs_has_precedence_over_the_request(host: RunningHost) -> None:
    check_binary_outputs(f"http://{host.http_url}")
    half = {
        "inputs": [{"name": "X", "shape": [0, 1], "datatype": "FP16", "data": []}],
        "outputs": [{"name": "Y"}],
        "parameters": {"binary_data_output": True},
    }
    status, text = send_request(host, "POST", "/v2/models/half/infer", json.dumps(half).encode())
    assert (status, text[-2:]) == (200, "\0\0"), text


RAW: dict[str, tuple[str, bytes, int, str]] = {
    "a variable shape": (
        "identity",
        np.ones(2, np.float32).tobytes(),
        200,
        '{"model_name":"identity","model_version":"1","outputs":[{"name":"OUTPUT0",'
        '"datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}}]}'
        + np.ones(2, np.float32).tobytes().decode("latin-1"),
    ),
    "several inputs": (
        "batched",
        b"",
        400,
        error(
            MISMATCH + "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs"
            " in 'batched' model configuration"
        ),
    ),
    "several variable dimensions": (
        "half",
        b"",
        400,
        error(
            MISMATCH + "The shape of the raw input 'X' can not be deduced because there are more"
            " than one variable-sized dimension"
        ),
    ),
    "a decoupled model": (
        "stream",
        b"",
        501,
        error("HTTP end point doesn't support models with decoupled transaction policy"),
    ),
}


@pytest.mark.parametrize("case", RAW)
def test_raw_binary_requests_are_answered_or_refused_as_by_triton(
    host: RunningHost, case: str
) -> None:
    model, body, status, text = RAW[case]
    path = f"/v2/models/{model}/infer"
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        connection.request("POST", path, body, {"Inference-Header-Content-Length": "0"})
        response = connection.getresponse()
        assert (response.status, response.read().decode("latin-1")) == (status, text)


def test_an_fp16_input_without_elements_may_be_json(host: RunningHost) -> None:
    empty = {"name": "X", "shape": [0, 1], "datatype": "FP16", "data": []}
    request = {"inputs": [empty], "parameters": {"binary_data_output": True}}
    path = "/v2/models/half/infer"
    status, text = send_request(host, "POST", path, json.dumps(request).encode())
    assert (status, text[-2:]) == (200, "\0\0"), text
    one = {**empty, "shape": [1, 1], "data": [1]}
    assert send_request(host, "POST", path, json.dumps({"inputs": [one]}).encode()) == (
        400,
        error(
            "receiving FP16 data via JSON is not supported. Please use the binary data format for"
            " input X"
        ),
    )
    no_array = {**empty, "shape": [1, 1], "data": 1}
    assert send_request(host, "POST", path, json.dumps({"inputs": [no_array]}).encode()) == (
        500,
        error("Unable to parse 'data': attempt to access JSON non-array as array"),
    )


TOO_FEW = "Failed to parse 'data' field: shape does not match true shape"
TOO_MANY = "Unable to parse 'data': Shape does not match true shape of 'data' field"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("[]", TOO_FEW),
        ("[1]", TOO_FEW),
        ("[[1],[]]", TOO_FEW),
        ("[1,2,3]", TOO_MANY),
        ("[[1,2],3]", TOO_MANY),
    ],
)
def test_data_of_a_wrong_size_is_refused(host: RunningHost, data: str, text: str) -> None:
    tensor = {"name": "INPUT0", "shape": [2], "datatype": "FP32", "data": json.loads(data)}
    body = json.dumps({"inputs": [tensor]}).encode()
    assert send_request(host, "POST", "/v2/models/identity/infer", body) == (500, error(text))


def test_an_fp16_output_needs_binary_data(host: RunningHost) -> None:
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "X",
                    "shape": [1, 1],
                    "datatype": "FP16",
                    "parameters": {"binary_data_size": 2},
                }
            ]
        }
    ).encode()
    length = str(len(head))
    answer = send_request(
        host, "POST", "/v2/models/half/infer", head + b"ab", Inference_Header_Content_Length=length
    )
    assert answer == (
        400,
        error(
            "sending FP16 data via JSON is not supported. Please use the binary data format for"
            " output"
        ),
    )


def test_classes_have_values_indices_and_labels(host: RunningHost) -> None:
    entry = '{"name":"X","shape":[2,2],"datatype":"FP32","data":[1,2,4,3]}'
    wanted = '{"name":"Y","parameters":{"classification":1}}'
    body = f'{{"inputs":[{entry}],"outputs":[{wanted}]}}'
    assert send_request(host, "POST", "/v2/models/batched/infer", body.encode()) == (
        200,
        (
            '{"model_name":"batched","model_version":"1","outputs":[{"name":"Y","datatype":"BYTES",'
            '"shape":[2,1],"data":["4.000000:1:one","8.000000:0:zero"]}]}'
        ),
    )


# Generation (1.10)

PROPER = "The schema can not convert input 'X' to tensor with proper shape"

GENERATED: dict[str, tuple[str, str, int, str]] = {
    "a scalar": (
        "identity",
        '{"INPUT0":1}',
        200,
        '{"OUTPUT0":1.0,"model_name":"identity","model_version":"1"}',
    ),
    "an array": (
        "identity",
        '{"INPUT0":[1,2]}',
        200,
        '{"OUTPUT0":[1.0,2.0],"model_name":"identity","model_version":"1"}',
    ),
    "an empty array": (
        "identity",
        '{"INPUT0":[]}',
        200,
        '{"OUTPUT0":[],"model_name":"identity","model_version":"1"}',
    ),
    "nested members": (
        "identity",
        '{"parameters":{"INPUT0":1,"a":2},"b":"c"}',
        200,
        '{"OUTPUT0":1.0,"model_name":"identity","model_version":"1"}',
    ),
    "with an id": (
        "identity",
        '{"INPUT0":1,"id":"z"}',
        200,
        '{"OUTPUT0":1.0,"id":"z","model_name":"identity","model_version":"1"}',
    ),
    "a batch": (
        "batched",
        '{"X":[1,2,3,4]}',
        200,
        '{"Y":[2.0,4.0,6.0,8.0],"model_name":"batched","model_version":"1"}',
    ),
    "no batch": ("batched", '{"X":[1,2,3]}', 400, error(PROPER)),
    "a member of nothing": (
        "identity",
        '{"INPUT0":1,"a":null}',
        400,
        error("parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'."),
    ),
    "an input twice": (
        "identity",
        '{"INPUT0":1,"INPUT0":2}',
        400,
        error(MISMATCH + "input 'INPUT0' already exists in request"),
    ),
    "an input of text": (
        "identity",
        '{"INPUT0":"x"}',
        500,
        error("Unable to parse 'data': attempt to access JSON non-number as double"),
    ),
    "arrays of arrays": (
        "identity",
        '{"INPUT0":[[1,2],[3,4]]}',
        500,
        error("Unable to parse 'data': Shape does not match true shape of 'data' field"),
    ),
    "arrays of one element": (
        "identity",
        '{"INPUT0":[[1],[2]]}',
        200,
        '{"OUTPUT0":[1.0,2.0],"model_name":"identity","model_version":"1"}',
    ),
    "arrays of arrays of strings": (
        "words",
        '{"INPUT0":[["a","b"]]}',
        400,
        error(
            MISMATCH + "unexpected number of string elements 2 for inference input 'INPUT0' for"
            " model 'words', expecting 1"
        ),
    ),
    "parameters that are none": (
        "identity",
        '{"parameters":7}',
        500,
        error(
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as"
            " object"
        ),
    ),
    "parameters of parameters": (
        "identity",
        '{"parameters":{"a":[]}}',
        400,
        error(
            "Converting keyword: 'parameters': parameter 'a' has invalid type. It should be either"
            " 'int', 'bool', or 'string'."
        ),
    ),
    "halves": (
        "half",
        '{"X":[1]}',
        400,
        error(
            "receiving FP16 data via JSON is not supported. Please use the binary data format for"
            " input X"
        ),
    ),
    "an unknown model": ("missing", "{}", 404, error(UNKNOWN + "'missing' is not found")),
}
"""Model and body of the request; status and body of the response."""


@pytest.mark.parametrize("way", ["generate", "generate_stream"])
@pytest.mark.parametrize("case", GENERATED)
def test_generate_requests_are_answered_or_refused_as_by_triton(
    host: RunningHost, case: str, way: str
) -> None:
    model, body, status, text = GENERATED[case]
    expected = f"data: {text}\n\n" if status == 200 and way == "generate_stream" else text
    assert send_request(host, "POST", f"/v2/models/{model}/{way}", body.encode()) == (
        status,
        expected,
    )


def test_generate_rejects_compressed_bodies(host: RunningHost) -> None:
    answer = send_request(
        host, "POST", "/v2/models/identity/generate", b"{}", Content_Encoding="gzip"
    )
    assert answer == (400, error("Unsupported content-encoding, only 'identity' is supported."))


@pytest.mark.parametrize("path", [TRACE, "/v2/logging"])
def test_settings_accept_null_and_refuse_other_bodies_that_are_no_object(
    host: RunningHost, path: str
) -> None:
    assert send_request(host, "POST", path, b"null") == send_request(host, "GET", path)
    for body in (b"[]", b"5", b'"x"'):
        answer = send_request(host, "POST", path, body)
        assert answer == (500, error("attempt to get members for non-object"))


# Loading from what the client sends (1.5)


@pytest.fixture
def sent(host: RunningHost) -> Iterator[str]:
    yield "sent"
    assert send_request(host, "POST", "/v2/repository/models/sent/unload") == (200, "")
    host.wait_for("successfully unloaded 'sent'")


def test_a_load_request_can_contain_the_model(host: RunningHost, sent: str) -> None:
    config: dict[str, object] = {"backend": "python", "input": [], "output": []}
    tensors = [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}]
    config |= {"input": tensors, "output": [{**tensors[0], "name": "Y"}]}
    file = base64.b64encode(DOUBLING.encode()).decode()
    body = {"parameters": {"config": json.dumps(config), "file:1/model.py": file}}
    load = f"/v2/repository/models/{sent}/load"
    assert send_request(host, "POST", load, json.dumps(body).encode()) == (200, "")
    entry = '{"name":"X","shape":[2],"datatype":"FP32","data":[1,2]}'
    answer = send_request(
        host, "POST", f"/v2/models/{sent}/infer", f'{{"inputs":[{entry}]}}'.encode()
    )
    assert json.loads(answer[1])["outputs"][0]["data"] == [2.0, 4.0]
    # A model that is not on disk is not in the index.
    assert sent not in send_request(host, "POST", "/v2/repository/index")[1]


# Load reports for load balancers (1.9)

REPORTS = {
    "text": (
        "TEXT named_metrics.kv_cache_utilization=0.375000, named_metrics.max_token_capacity=512"
    ),
    "json": 'JSON {"named_metrics":{"kv_cache_utilization":0.375,"max_token_capacity":512}}',
    "xml": None,
    "": None,
}


@pytest.mark.parametrize("form", REPORTS, ids=lambda form: form or "none")
@pytest.mark.parametrize("way", ["generate", "generate_stream"])
def test_orca_load_report_headers(host: RunningHost, way: str, form: str) -> None:
    headers = {"Endpoint-Load-Metrics-Format": form} if form else {}
    with closing(http.client.HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        connection.request("POST", f"/v2/models/busy/{way}", b'{"INPUT0":1}', headers)
        response = connection.getresponse()
        response.read()
    assert (response.status, response.headers["endpoint-load-metrics"]) == (200, REPORTS[form])


RELUCTANT = """
class TritonPythonModel:
    def is_ready(self):
        return False

    def execute(self, requests):
        return [None for _ in requests]
"""


@pytest.fixture(scope="module")
def unready(
    tmp_path_factory: pytest.TempPathFactory, module_serve: Serve, host: RunningHost
) -> RunningHost:
    """A host with a ready model, and one whose `is_ready` returns false."""
    repository = RepositoryBuilder(tmp_path_factory.mktemp("unready"))
    repository.copy("identity")
    repository.add("reluctant", RELUCTANT, BUSY_CONFIG)
    return module_serve(repository).wait_started()


@pytest.mark.parametrize("way", ["generate", "generate_stream"])
def test_generate_has_the_status_of_the_error_of_the_model(unready: RunningHost, way: str) -> None:
    status, text = send_request(unready, "POST", f"/v2/models/reluctant/{way}", b'{"INPUT0":1}')
    assert status == 500
    assert "returned no response for this request" in text


def test_readiness_gives_the_reason(unready: RunningHost) -> None:
    assert send_request(unready, "GET", "/v2/health/live") == (200, "")
    assert send_request(unready, "GET", "/v2/health/ready") == (400, "")
    assert send_request(unready, "GET", "/v2/models/identity/ready") == (200, "")
    for path in ("/v2/models/reluctant/ready", "/v2/models/reluctant/versions/1/ready"):
        assert send_request(unready, "GET", path) == (400, error("Model version not ready"))


def test_a_missing_metric_omits_the_load_report_and_is_logged(unready: RunningHost) -> None:
    path, headers = "/v2/models/identity/generate", {"endpoint-load-metrics-format": "text"}
    with closing(http.client.HTTPConnection(unready.http_url, timeout=DEADLINE)) as connection:
        connection.request("POST", path, b'{"INPUT0":1}', headers)
        response = connection.getresponse()
        assert (response.status, response.headers["endpoint-load-metrics"]) == (200, None)
    unready.wait_for(
        "cannot report the load to a client: no metric nv_trt_llm_kv_cache_block_metrics with"
        " kv_cache_block_type tokens_per or used or max"
    )


def test_the_options_of_a_server_are_in_its_log(host: RunningHost) -> None:
    assert "| model_control_mode               | MODE_EXPLICIT" in host.output
    assert "| startup_models_0                 | *" in host.output
