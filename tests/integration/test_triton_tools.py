"""Programs for Triton, unmodified: perf_analyzer, grpcurl, Model Analyzer, KServe's SDK, others.

`make triton-tools` installs the first two, `make model-analyzer` the next two. The commands are
those of docs/how-to/tools.md.
"""

from __future__ import annotations

import csv
import fcntl
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.__main__ import REPOSITORY
from benchmarks.peer import Peer
from benchmarks.servers import free_port, theirs
from tests.conftest import DEADLINE, ROOT, Serve
from tests.stories import blocks, comparable, pattern, steps
from tests.triton_tools.languages import LANGUAGES

PAGE = ROOT / "docs" / "how-to" / "tools.md"
PROGRAMS = ROOT / "tests" / "triton_tools"
TOOLS = ROOT / ".venv-triton-tools" / "bin"
AIPERF = ROOT / ".venv-openai-clients" / "bin"
ANALYZER = ROOT / ".venv-model-analyzer" / "bin"
PROGRAM_FOLDERS = (Path(sys.executable).parent, ANALYZER, TOOLS, AIPERF)
CUDA_LIBRARY = "lib/python*/site-packages/nvidia/cuda_runtime/lib"
MODELS = (
    *("identity_fp32", "identity_batched", "identity_bytes", "identity_sequence"),
    *("ensemble_identity", "bls_identity", "repeat", "repeat_text", "embed_text"),
)
CLIENTS = {"Go": "client.go", "C++": "client.cc", "Java": "Client.java"}
SHORT_WINDOWS = (
    "measurement-mode: time_windows, measurement-interval: 300, stability-percentage: 999, "
    "max-trials: 3"
)
SAID = """\
live true ready true
input INPUT0 FP32 [-1]
output OUTPUT0 1 2 3 4
stream 3
error 5 Request for unknown model: 'missing' is not found
"""
"""What the clients in Go, C++ and Java print."""


SERVERS = ["pbhost", pytest.param("triton", marks=pytest.mark.test_all(reason="the other server"))]
needs_tools = pytest.mark.skipif(not TOOLS.exists(), reason="make triton-tools")
needs_analyzer = pytest.mark.skipif(
    not (TOOLS.exists() and ANALYZER.exists()), reason="make triton-tools model-analyzer"
)
takes_long = pytest.mark.test_all(reason="measures one configuration after another")


class Ports:
    """The ports of a server, by those that the page names."""

    def __init__(self, grpc: int, http: int, metrics: int, *, of_triton: bool = False) -> None:
        self._ports = {"8001": grpc, "8000": http, "8002": metrics}
        self.of_triton = of_triton

    def __getitem__(self, port: str) -> str:
        return f"127.0.0.1:{self._ports[port]}"

    def put_into(self, text: str) -> str:
        """The text with these ports instead of the usual ones."""
        return re.sub("localhost:(800[012])", lambda found: self[found[1]], text)


@contextmanager
def serving(which: str, serve: Serve, *flags: str) -> Iterator[Ports]:
    """This server, or Triton where it is installed, with explicit model control."""
    flags = ("--model-control-mode=explicit", *flags)
    if which == "triton":
        metrics = free_port()
        flags = (*flags, "--allow-metrics=true", f"--metrics-port={metrics}")
        with theirs(REPOSITORY, installed_triton(), flags) as server:
            yield Ports(server.grpc_port, server.http_port, metrics, of_triton=True)
        return
    host = serve(REPOSITORY, "--allow-client-shm=true", *flags).wait_started()
    http, metrics = (int(url.rpartition(":")[2]) for url in (host.http_url, host.metrics_url))
    yield Ports(host.port, http, metrics)


@pytest.fixture(scope="module", params=SERVERS)
def ports(request: pytest.FixtureRequest, module_serve: Serve) -> Iterator[Ports]:
    """A server with the models that the page asks."""
    with serving(
        request.param, module_serve, *(f"--load-model={name}" for name in MODELS)
    ) as ports:
        yield ports


@pytest.fixture(scope="module", params=SERVERS)
def controlled(request: pytest.FixtureRequest, module_serve: Serve) -> Iterator[Ports]:
    """A server that loads what Model Analyzer tells it to."""
    with serving(request.param, module_serve) as ports:
        yield ports


def installed_triton() -> Peer:
    peer = Peer(Path(os.environ.get("PEER", "/tmp/triton-peer")))
    if not peer.python.exists():
        pytest.skip("Triton is not installed: python -m benchmarks --keep installs it")
    return peer


def commands(program: str) -> list[str]:
    """The commands of the page that run a program."""
    return [
        command
        for block in blocks(PAGE)
        if block.language == "console"
        for command, _ in steps(block.text)
        if re.search(rf"(^|[|&] ){program} ", command)
    ]


def flags_of(command: str) -> str:
    """What a command of perf_analyzer is about, as the name of its test."""
    return re.sub(r"^perf_analyzer -m |localhost:| -u localhost:\d+", "", command)


def write_files(folder: Path, ports: Ports) -> None:
    """Writes the files of the page."""
    for block in blocks(PAGE):
        if block.word == "file":
            (folder / block.argument).write_text(ports.put_into(block.text))


def run(command: str, folder: Path, seconds: float = DEADLINE) -> str:
    """The output of a command of the page."""
    libraries = next(TOOLS.parent.glob(CUDA_LIBRARY), "")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={
            **os.environ,
            "PATH": ":".join((*map(str, PROGRAM_FOLDERS), os.environ["PATH"])),
            "LD_LIBRARY_PATH": str(libraries),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    if "error while loading shared libraries" in done.stdout:
        pytest.skip(done.stdout.strip())  # libb64-0d is a package of the system
    assert done.returncode == 0, f"$ {command}\n{done.stdout}"
    return done.stdout


@needs_tools
@pytest.mark.parametrize("command", commands("perf_analyzer"), ids=flags_of)
def test_perf_analyzer_measures(command: str, ports: Ports, tmp_path: Path) -> None:
    write_files(tmp_path, ports)
    fast = "--request-count 40"  # which ranges and intervals do not take
    if re.search(r"range \d+:|intervals", command):
        fast = "--measurement-interval 200 --stability-percentage 99999"
    with (TOOLS / "perf_analyzer").open("rb") as program:
        if "--shared-memory" in command:  # has the same names in each run
            fcntl.flock(program, fcntl.LOCK_EX)
        said = run(f"{ports.put_into(command)} {fast} -f report.csv", tmp_path)
    assert "rror: " not in said
    assert "Failed" not in said
    measured = said.count("Client: \n")
    assert measured >= 1
    served = re.findall(r"Successful request count: (\d+)", said)
    assert len(served) >= measured
    assert all(int(count) > 0 for count in served)
    composing = said.partition("Composing models:")[2]
    assert bool(composing) == command.startswith(
        ("perf_analyzer -m ensemble", "perf_analyzer -m bls")
    )
    assert re.search(
        r"queue \d+ usec \+ compute input \d+ usec \+ compute infer \d+ usec \+ comp",
        composing or said,
    )
    with (tmp_path / "report.csv").open() as report:
        rows = list(csv.DictReader(report))
    assert len(rows) == measured
    assert all(float(row["Inferences/Second"]) > 0 for row in rows)
    assert all(float(row["Server Compute Infer"]) > 0 for row in rows)


@needs_tools
def test_grpcurl_asks_without_a_proto_file(ports: Ports, tmp_path: Path) -> None:
    if ports.of_triton:
        pytest.skip("Triton has no reflection")
    for block in blocks(PAGE):
        for command, expected in steps(block.text):
            if command.startswith("grpcurl "):
                said = run(ports.put_into(command), tmp_path)
                assert pattern(expected).fullmatch(comparable(said)), said


@pytest.mark.skipif(not (AIPERF / "aiperf").exists(), reason="make openai-clients")
@pytest.mark.test_all(reason="its start takes most of 15 s")
@pytest.mark.parametrize("command", commands("aiperf"), ids=lambda line: line.split()[7])
def test_aiperf_measures(command: str, ports: Ports, tmp_path: Path) -> None:
    """It counts tokens, and reports no failed request."""
    chats = "--endpoint-type chat" in command
    if chats and ports.of_triton:
        pytest.skip("Triton has no routes under /v1")
    write_files(tmp_path, ports)
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "tokenizer").mkdir()
    words.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(kind))
    run(f"{ports.put_into(command)} --artifact-dir report", tmp_path, 2 * DEADLINE)
    report = json.loads((tmp_path / "report" / "profile_export_aiperf.json").read_text())
    requests = 100 if chats else 16
    assert report["request_count"]["avg"] == requests
    assert report["output_sequence_length"]["avg"] == (8 if chats else 1)
    assert "error_request_count" not in report or report["error_request_count"]["avg"] == 0
    if chats:
        assert report["time_to_first_token"]["count"] == requests
        scraped = (tmp_path / "report" / "server_metrics_export.json").read_text()
        assert "nv_inference_request_success" in scraped


@needs_analyzer
@takes_long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", commands("model-analyzer"), ids=lambda line: line.split()[-1])
def test_model_analyzer_reports(command: str, tmp_path: Path, controlled: Ports) -> None:
    """It measures the given configuration and others, and writes tables and pages."""
    write_files(tmp_path, controlled)
    name = command.split()[-1]
    if "local" in name:
        if controlled.of_triton:
            pytest.skip("the script of the page starts this server")
        unused = Ports(free_port(), free_port(), free_port())
        write_files(tmp_path, unused)
        shutil.copytree(REPOSITORY / "identity_batched", tmp_path / "models" / "identity_batched")
    for configuration in tmp_path.glob("*.yaml"):  # shorter windows
        text = configuration.read_text()
        configuration.write_text(text.replace("shape:", f"{SHORT_WINDOWS}, shape:"))
    run(command, tmp_path, 600)
    results = tmp_path / "results"
    with (results / "metrics-model-inference.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert len({row["Model Config Path"] for row in rows}) >= 2
    assert all(float(row["Throughput (infer/sec)"]) > 0 for row in rows)
    assert {row["Satisfies Constraints"] for row in rows} == {"Yes"}
    pages = list((tmp_path / "reports").rglob("*.html"))
    assert {page.name for page in pages} == {"result_summary.html", "detailed_report.html"}
    assert not (tmp_path / "perf_analyzer_error.log").exists()


@needs_analyzer
@pytest.mark.test_all(reason="its start takes most of 10 s; other clients use the same protocols")
def test_kserves_sdk_is_served(ports: Ports) -> None:
    python = ANALYZER / "python"
    command: list[str | Path] = [
        python,
        PROGRAMS / "kserve_client.py",
        ports["8000"],
        ports["8001"],
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    values = [["7", [1, 2, 3, 4]], ["7", ["a", "\u00e9"]]]
    assert json.loads(done.stdout) == {
        "health": [True, True],
        "models": [True, False],
        "gRPC, typed": values,
        "gRPC, raw": values,
        "REST: models": [True, False],
        "REST, JSON": values,
        "REST, bytes": values,
    }


@pytest.fixture(scope="session", params=CLIENTS)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a client whose code `protoc` has generated."""
    language = LANGUAGES[request.param]
    if not language.is_installed():
        pytest.skip(f"apt-get install {language.packages}")
    return language.command(PROGRAMS / CLIENTS[request.param], tmp_path_factory.mktemp("client"))


@pytest.mark.test_all(reason="compiles for a minute")
def test_generated_clients_are_served(client: list[str], ports: Ports) -> None:
    done = subprocess.run(
        [*client, ports["8001"]], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.stdout == SAID, done.stderr


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/repeat/ready"])
def test_probes_of_charts_get_what_they_expect(ports: Ports, path: str) -> None:
    """As kubelets ask."""
    connection = http.client.HTTPConnection(ports["8000"], timeout=DEADLINE)
    headers = {"User-Agent": "kube-probe/1.33", "Accept": "*/*", "Connection": "close"}
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    assert (response.status, response.read()) == (200, b"")
    connection.close()


def test_metrics_by_which_charts_scale_are_there(ports: Ports) -> None:
    connection = http.client.HTTPConnection(ports["8002"], timeout=DEADLINE)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    for name in ("nv_inference_queue_duration_us", "nv_inference_request_success"):
        assert f'{name}{{model="identity_fp32",version="1"}}' in page
    connection.close()
