"""`pbhost infer`: one request to a running server, over HTTP and gRPC."""

from __future__ import annotations

import re
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, run_pbhost
from tests.integration.test_tls import Certificates
from tests.waiting import UNTIL_SOURCE

MIXED = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])

    def execute(self, requests):
        responses = []
        for request in requests:
            given = {tensor.name(): tensor for tensor in request.inputs()}
            if "FAIL" in given:
                error = pb_utils.TritonError("asked to fail")
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            parameters = dict(sorted(json.loads(request.parameters()).items()))
            told = [request.request_id(), self.version, parameters]
            outputs = [
                pb_utils.Tensor("Y", 2 * given["X"].as_numpy()),
                pb_utils.Tensor("TOLD", np.array([[json.dumps(told)]], dtype=np.object_)),
            ]
            if "TEXT" in given:
                outputs.append(pb_utils.Tensor("ECHO", given["TEXT"].as_numpy()))
            if "HALF" in given:
                outputs.append(given["HALF"])
            responses.append(pb_utils.InferenceResponse(outputs, parameters={"cost": 3}))
        return responses
"""
MIXED_CONFIG = """
max_batch_size: 4
version_policy { all { } }
input [
  { name: "X" data_type: TYPE_FP16 dims: [ -1 ] },
  { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] optional: true },
  { name: "HALF" data_type: TYPE_BF16 dims: [ 1 ] optional: true },
  { name: "FAIL" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [
  { name: "Y" data_type: TYPE_FP16 dims: [ -1 ] },
  { name: "TOLD" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "ECHO" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "HALF" data_type: TYPE_BF16 dims: [ 1 ] }
]
"""
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            for number in range(count):
                out = pb_utils.Tensor("I", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([out]))
            if count > 2:
                error = pb_utils.TritonError("too many")
                sender.send(pb_utils.InferenceResponse([], error))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNT_CONFIG = """
model_transaction_policy { decoupled: true }
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "I" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def infer(
    *arguments: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`pbhost infer` with these arguments, when it has ended."""
    return run_pbhost("infer", *arguments, env=env)


def measure(*arguments: str, env: Mapping[str, str]) -> tuple[int, str]:
    """`pbhost bench` with these arguments: its exit status, and its errors."""
    done = run_pbhost("bench", *arguments, env=env)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def host(
    module_repository: RepositoryBuilder,
    module_serve: Serve,
    tmp_path_factory: pytest.TempPathFactory,
) -> RunningHost:
    module_repository.add("mixed", MIXED, MIXED_CONFIG)
    module_repository.add("mixed", MIXED, MIXED_CONFIG, version=3)
    module_repository.add("count", COUNT, COUNT_CONFIG)
    return module_serve(module_repository).wait_started()


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, host: RunningHost) -> str:
    """The address of the host, over each protocol."""
    return f"http://{host.http_url}" if request.param == "http" else f"grpc://{host.url}"


def test_responses_are_printed_as_run_prints_them(url: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([1, 2.5], np.float16))
    (tmp_path / "cat.png").write_bytes(b"\x89PNG\0")
    done = infer(
        url, "mixed", f"--input=X=@{tmp_path / 'x.npy'}", f"--input=TEXT=@{tmp_path / 'cat.png'}",
        "--input=HALF=1.5",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    lines = re.escape(
        'response 1, parameters {"cost":3}\n'
        "  Y FP16 [1, 2]\n"
        "    [[2., 5.]]\n"
        "  TOLD BYTES [1, 1]\n"
        "    [['[\"\", 3, {}]']]\n"
        "  ECHO BYTES [1, 1]\n"
        "    [[b'\\x89PNG\\x00']]\n"
        "  HALF BF16 [1, 1]\n"
        "    [[1.5]]\n"
    )
    assert re.fullmatch(lines + r"done in \d+\.\d{3} ms\n", done.stdout), done.stdout


def test_version_id_parameters_and_outputs_reach_the_server(url: str) -> None:
    done = infer(
        url, "mixed", "--input=X=1", "--version=1", "--request-id=order 66", "--output=TOLD",
        "--parameter=count=7", "--parameter=flag=true", "--parameter=word=two words",
        *(["--header=it's~me: caf\xe9"] if url.startswith("http") else ["--header=it: me"]),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = '["order 66", 1, {"count": 7, "flag": true, "word": "two words"}]'
    assert told in done.stdout
    assert "Y FP16" not in done.stdout


def test_errors_are_one_line_and_set_the_status(url: str) -> None:
    for arguments, status, text in [
        (("mixed", "--input=X=1", "--input=FAIL=true"), 1, "asked to fail"),
        (("nowhere",), 1, "'nowhere' is not found"),
        (("mixed", "--version=2", "--input=X=1"), 1, "is not found"),
        (("mixed", "--input=X=[[[1]]]"), 2, "input X TYPE_FP16 [-1, -1] (the first is the batch"),
        (("mixed", "--input=X=red"), 2, "is not JSON"),
        (("mixed", "--input=Z=1"), 2, "the model has no input 'Z'; its inputs are"),
    ]:
        done = infer(url, *arguments)
        assert (done.returncode, done.stdout) == (status, ""), done.stderr
        first, *more = done.stderr.splitlines()
        assert first.startswith("pbhost infer: "), done.stderr
        assert text in first
        assert all(line.startswith("  ") for line in more)
    missing = infer(url, "mixed")
    assert missing.returncode == 2
    assert "--input X=VALUE  for X TYPE_FP16" in missing.stderr
    assert "TEXT" not in missing.stderr, "an optional input is not required"


def test_responses_of_a_decoupled_model_are_printed_one_by_one(host: RunningHost) -> None:
    url = f"grpc://{host.url}"
    done = infer(url, "count", "--input=N=2")
    assert (done.returncode, done.stderr) == (0, "")
    expected = ["response 1", "  I INT32 [1]", "    [0]", "response 2", "  I INT32 [1]", "    [1]"]
    assert done.stdout.splitlines()[:-1] == expected
    assert infer(url, "count", "--input=N=0").stdout.startswith("no response\n")
    failed = infer(url, "count", "--input=N=3")
    assert (failed.returncode, failed.stderr) == (1, "response 4: error: too many\n")
    refused = infer(f"http://{host.http_url}", "count", "--input=N=2")
    assert refused.returncode == 1
    assert refused.stderr == (
        "pbhost infer: model 'count' is decoupled: HTTP has no streams of tensors; use the address"
        " of the gRPC port, grpc://HOST:PORT\n"
    )


def test_headers_are_sent_where_the_server_asks_for_them(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("mixed", MIXED, MIXED_CONFIG)
    host = serve(
        repository,
        "--http-restricted-api=inference,model-config:who=me",
        "--grpc-restricted-protocol=inference,model-config:who=me",
    ).wait_started()
    for url, name in (
        (f"http://{host.http_url}", "who"),
        (f"grpc://{host.url}", "triton-grpc-protocol-who"),
    ):
        refused = infer(url, "mixed", "--input=X=[[1]]")
        assert refused.returncode == 1
        assert "restricted" in refused.stderr
        accepted = infer(url, "mixed", "--input=X=1", f"--header={name}: me")
        assert (accepted.returncode, accepted.stderr) == (0, "")
        assert "    [[2.]]" in accepted.stdout


def test_metadata_name_the_inputs_where_the_configuration_is_restricted(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add(
        "double",
        """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                x = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", 2 * x)])]
        """,
        """
        input { name: "X" data_type: TYPE_INT32 dims: [ -1 ] }
        output { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] }
        """,
    )
    host = serve(
        repository,
        "--http-restricted-api=model-config:who=me",
        "--grpc-restricted-protocol=model-config:who=me",
    ).wait_started()
    for url in (f"http://{host.http_url}", f"grpc://{host.url}"):
        done = infer(url, "double", "--input=X=[1, 2]")
        assert (done.returncode, done.stderr) == (0, "")
        assert "  Y INT32 [2]\n    [2, 4]\n" in done.stdout


def test_a_server_with_mutual_tls_is_asked(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.add("mixed", MIXED, MIXED_CONFIG)
    files = Certificates.make(tmp_path)
    root = files["root.pem"]
    flags = [
        flag
        for protocol in ("grpc", "http")
        for flag in (
            f"--{protocol}-use-ssl-mutual=true",
            f"--{protocol}-server-cert={files['server.pem']}",
            f"--{protocol}-server-key={files['server.key']}",
            f"--{protocol}-root-cert={root}",
        )
    ]
    host = serve(repository, *flags).wait_started()
    trusted = {"SSL_CERT_FILE": root, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": root}
    ours = (f"--certificate-file={files['client.pem']}", f"--key-file={files['client.key']}")
    once = ("--requests=3", "--warmup=0")
    for url in (f"https://{host.http_url}", f"grpcs://{host.url}"):
        for env, ca_file in ((trusted, ()), ({}, (f"--ca-file={root}",))):
            done = infer(url, "mixed", "--input=X=1", *ours, *ca_file, env=env)
            assert (done.returncode, done.stderr) == (0, "")
            assert "    [[2.]]" in done.stdout
            assert measure(url, "mixed", *once, *ours, *ca_file, env=env) == (0, "")
        strange = infer(url, "mixed", "--input=X=1", "--timeout=20")
        assert strange.returncode == 1
        said = strange.stderr.splitlines()[-1]  # the library of gRPC may print a line before
        assert said.startswith(f"pbhost infer: no answer from {url}: ")
    url, flags = f"https://{host.http_url}", [f"--ca-file={root}", *ours]
    commands: list[tuple[str, ...]] = [
        ("models", url, "list"),
        ("wait", url),
        ("stacks", url),
        ("crashes", url),
        ("top", url, "--once", "--interval=1"),
    ]
    for command in commands:
        done = run_pbhost(*command, *flags)
        assert (done.returncode, done.stderr) == (0, ""), command
    for command in (("chat", url, "m"), ("record", url, str(tmp_path / "out"), "--model=mixed")):
        done = run_pbhost(*command, *flags, given="hello\n")
        assert done.returncode == 1
        assert "no answer" not in done.stderr  # the server refuses it
    for address, flag, status, text in (
        ("http://localhost:1", f"--ca-file={root}", 2, "certificates need TLS: use https://"),
        ("https://localhost:1", ours[0], 2, "needs both --certificate-file and --key-file"),
        ("https://localhost:1", f"--ca-file={tmp_path}/no", 1, f"cannot read '{tmp_path}/no'"),
    ):
        for name in ("infer", "models"):
            done = run_pbhost(name, address, "list", flag)
            assert (done.returncode, done.stdout) == (status, "")
            assert text in done.stderr


def test_a_request_that_takes_too_long_is_given_up(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    repository.add(
        "slow",
        UNTIL_SOURCE + "import os\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        f"        until(lambda: os.path.exists({str(go)!r}), 'the word to continue')\n",
        'input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }\n',
    )
    host = serve(repository).wait_started()
    for url in (f"http://{host.http_url}", f"grpc://{host.url}"):
        done = infer(url, "slow", "--input=X=1", "--timeout=1.5")
        assert done.returncode == 1
        assert re.fullmatch(rf"pbhost infer: no answer from {url}: .+\n", done.stderr)
    go.touch()


def test_a_wrong_command_line_or_address_is_told_in_a_line(host: RunningHost) -> None:
    done = infer(host.http_url, "mixed")
    assert done.returncode == 2
    expected = f"expected http://HOST:PORT or grpc://HOST:PORT, got '{host.http_url}'"
    assert done.stderr == f"pbhost infer: {expected}\n"
    assert "the following arguments are required: MODEL" in infer("http://localhost:1").stderr
    url = f"http://{host.http_url}"
    for flag, text in {
        "--parameter=x": "expected NAME=VALUE, got 'x'",
        "--parameter=x=[1]": "expected true, false, a number or a text, got '[1]'",
        "--input=x": "expected NAME=VALUE, got 'x'",
        "--timeout=0": "expected a number greater than 0, got 0",
    }.items():
        done = infer(url, "mixed", flag)
        assert done.returncode == 2
        assert text in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for scheme, other in (("http", host.url), ("grpc", host.http_url)):
        for address in (f"127.0.0.1:{port}", other):
            done = infer(f"{scheme}://{address}", "mixed", "--input=X=1", "--timeout=20")
            assert done.returncode == 1
            start = f"pbhost infer: no answer from {scheme}://{address}: "
            assert done.stderr.startswith(start), done.stderr
            assert done.stderr.count("\n") == 1


OTHER_ANSWERS = {
    "html": b"<html>\xff</html>",
    "json": b"[1, 2]",
    "object": b'{"name": "m", "input": [3], "inputs": 3}',
}


@pytest.fixture
def other_server() -> Iterator[str]:
    """The address of an HTTP server of another kind, which answers everything with 200."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = OTHER_ANSWERS[self.headers.get("Kind", "html")]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(DEADLINE)


@pytest.mark.parametrize("kind", OTHER_ANSWERS)
@pytest.mark.parametrize(
    "command",
    [
        ("infer", "m"),
        ("stacks",),
        ("stacks", "--format=json"),
        ("crashes",),
        ("crashes", "--show=1"),
        ("crashes", "--lift"),
        ("top", "--once"),
        ("record", "--model=m"),
    ],
    ids=" ".join,
)
def test_a_server_of_another_kind_is_told_in_a_line(
    other_server: str, command: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    name, *rest = command
    if name == "record":
        rest.append(str(tmp_path / "recording"))
    done = run_pbhost(name, other_server, *rest, f"--header=Kind: {kind}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"pbhost {name}: unexpected answer from {other_server}; is it the address of the HTTP"
        " port?\n"
    )
