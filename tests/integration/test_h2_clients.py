"""Clients of other makers ask the gRPC endpoint: those of nghttp2, and gRPC's own in JavaScript."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from tritonclient.grpc import service_pb2 as pb

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve

SERVICE = "/inference.GRPCInferenceService"
VALUES = np.arange(16, dtype=np.float32)

nghttp2 = pytest.mark.skipif(
    shutil.which("h2load") is None or shutil.which("nghttp") is None,
    reason="the clients of nghttp2 are not installed",
)


@pytest.fixture(scope="module")
def host(module_serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> RunningHost:
    repository = RepositoryBuilder(tmp_path_factory.mktemp("models"))
    repository.copy("identity")
    return module_serve(repository).wait_started()


@pytest.fixture
def body(tmp_path: Path) -> Path:
    """A ModelInferRequest with gRPC's prefix."""
    message = pb.ModelInferRequest(model_name="identity", id="7")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=VALUES.shape)
    message.raw_input_contents.append(VALUES.tobytes())
    data = message.SerializeToString()
    path = tmp_path / "body"
    path.write_bytes(b"\0" + len(data).to_bytes(4, "big") + data)
    return path


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@nghttp2
@pytest.mark.parametrize(("connections", "streams"), [(1, 1), (1, 100), (20, 10)])
def test_h2load_has_every_request_answered(
    host: RunningHost, body: Path, connections: int, streams: int
) -> None:
    output = run(
        "h2load", "-n", "1000", "-c", str(connections), "-m", str(streams), "-d", str(body),
        "-H", "content-type: application/grpc", "-H", "te: trailers",
        f"http://{host.url}{SERVICE}/ModelInfer",
    )  # fmt: skip
    assert "1000 done, 1000 succeeded, 0 failed, 0 errored, 0 timeout" in output
    assert "1000 2xx, 0 3xx, 0 4xx, 0 5xx" in output


@nghttp2
def test_nghttp_sees_the_answer_and_its_trailers(host: RunningHost, body: Path) -> None:
    output = run(
        "nghttp", "-nv", "-d", str(body), "-H", "content-type: application/grpc",
        "-H", "te: trailers", f"http://{host.url}{SERVICE}/ModelInfer",
    )  # fmt: skip
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    assert ":status: 200" in plain
    assert "content-type: application/grpc" in plain
    assert "grpc-status: 0" in plain


@nghttp2
@pytest.mark.parametrize(
    ("options", "status"),
    [((), "405"), (("-H", ":method: POST", "-H", "content-type: text/html"), "415")],
)
def test_nghttp_gets_an_error_for_a_non_grpc_request(
    host: RunningHost, options: tuple[str, ...], status: str
) -> None:
    output = run("nghttp", "-nv", *options, f"http://{host.url}{SERVICE}/ServerLive")
    assert f":status: {status}" in re.sub(r"\x1b\[[\d;]*m", "", output)


SCRIPT = """
const fs = require('fs');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const [descriptors, url] = process.argv.slice(2);
const definition = loader.loadFileDescriptorSetFromBuffer(
    fs.readFileSync(descriptors), {keepCase: true});
const {GRPCInferenceService} = grpc.loadPackageDefinition(definition).inference;
const client = new GRPCInferenceService(url, grpc.credentials.createInsecure());
const values = Buffer.from(Float32Array.from({length: 16}, (_, i) => i).buffer);
const infer = (model) => ({model_name: model, id: 'js', raw_input_contents: [values],
    inputs: [{name: 'INPUT0', datatype: 'FP32', shape: [16]}]});
const ask = (method, request, options = {}) => new Promise((resolve) =>
    client[method](request, new grpc.Metadata(), options, (error, answer) =>
        resolve(error ? {code: error.code, details: error.details} : answer)));
const stream = (requests, stop) => new Promise((resolve) => {
    const call = client.ModelStreamInfer(), found = [];
    call.on('data', (answer) => { found.push(answer); if (stop) call.cancel(); });
    call.on('error', (error) => resolve({code: error.code, answers: found.length}));
    call.on('end', () => resolve({answers: found.length,
        errors: found.map((answer) => answer.error_message)}));
    for (const request of requests) call.write(request);
    if (!stop) call.end();
});
(async () => {
    const answer = await ask('ModelInfer', infer('identity'));
    const many = await Promise.all(Array.from({length: 50}, () =>
        ask('ModelInfer', infer('identity'))));
    console.log(JSON.stringify({
        live: await ask('ServerLive', {}),
        same: Buffer.compare(answer.raw_output_contents[0], values),
        id: answer.id,
        many: many.filter((one) => one.id === 'js').length,
        unknown: await ask('ModelInfer', infer('missing')),
        late: await ask('ModelInfer', infer('identity'), {deadline: Date.now() - 1}),
        streamed: await stream([infer('identity'), infer('missing'), infer('identity')], false),
        cancelled: await stream([infer('identity')], true),
    }));
    client.close();
})();
"""


def _closure(file: FileDescriptor, found: dict[str, FileDescriptor]) -> dict[str, FileDescriptor]:
    for other in file.dependencies:
        _closure(other, found)
    found[file.name] = file
    return found


@pytest.mark.network
@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")
def test_the_grpc_client_for_javascript_is_served(host: RunningHost, tmp_path: Path) -> None:
    try:
        subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "@grpc/grpc-js@1", "@grpc/proto-loader"],
            cwd=tmp_path, capture_output=True, timeout=90, check=True,
        )  # fmt: skip
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("npm cannot install @grpc/grpc-js")
    descriptors = FileDescriptorSet()
    for file in _closure(pb.DESCRIPTOR, {}).values():
        file.CopyToProto(descriptors.file.add())
    (tmp_path / "set").write_bytes(descriptors.SerializeToString())
    (tmp_path / "client.js").write_text(SCRIPT)
    found = json.loads(run("node", str(tmp_path / "client.js"), str(tmp_path / "set"), host.url))
    assert found["live"] == {"live": True}
    assert (found["same"], found["id"], found["many"]) == (0, "js", 50)
    assert found["unknown"]["code"] == 5
    assert "unknown model: 'missing'" in found["unknown"]["details"]
    assert found["late"]["code"] == 4
    assert found["streamed"]["answers"] == 3
    assert [bool(error) for error in found["streamed"]["errors"]].count(True) == 1
    assert found["cancelled"] == {"code": 1, "answers": 1}
