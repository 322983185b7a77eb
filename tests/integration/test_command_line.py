"""The `pbhost` command: its flags, its output, its end."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.clients import infer_error, run_command, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, Serve
from tests.waiting import UNTIL_SOURCE
from tests.working_directory import without_directory


def run(*arguments: str, under: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [*under, sys.executable, "-m", "pbhost", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)


def test_an_unknown_flag_is_a_clear_error_with_a_suggestion() -> None:
    done = run("serve", "--model-repositry=x")
    assert done.returncode == 1
    assert "--model-repositry" in done.stderr
    assert "--model-repository" in done.stderr


def test_help_lists_the_flags() -> None:
    done = run("serve", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--grpc-port" in done.stdout


def test_help_finds_flags_by_a_text() -> None:
    done = run("serve", "--help=cache-config")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("  --cache-config <string>\n")
    assert "--grpc-port" not in done.stdout
    assert run("top", "--help=INTERVAL").stdout.startswith("  --interval <float>\n")
    assert run("top", "--help=qqq").stdout == "no flag has 'qqq' in its name or description\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sing",), "unknown command 'sing'; pbhost --help lists all commands"),
        (
            ("server",),
            "unknown command 'server'; did you mean 'serve'? pbhost --help lists all commands",
        ),
        (("--model-repository=m",), "a command must come first: pbhost serve --model-repository=m"),
    ],
    ids=["unknown", "misspelt", "flag"],
)
def test_a_wrong_command_is_told_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (2, f"pbhost: {said}\n")


def test_without_a_command_the_usage_is_shown() -> None:
    done = run()
    assert done.returncode == 2
    assert "serve REPOSITORY ... " in done.stderr
    assert done.stderr.splitlines()[-1] == "a command must be given"


def test_help_and_version_are_answers() -> None:
    helped = run("--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "serve REPOSITORY ... " in helped.stdout
    for command in ("version", "--version"):
        told = run(command)
        assert told.returncode == 0
        assert re.fullmatch(r"pbhost \S+ \(as Triton 2\.73\.0\)\n", told.stdout)


@pytest.mark.parametrize("command", ["run", "check", "config"])
def test_the_help_of_a_command_looks_like_that_of_serve(command: str) -> None:
    done = run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: pbhost {command} ")
    assert "  --help\n\tPrint usage" in done.stdout
    flag = "  --backend-directory <string>\n\tDirectory of Python-based backends; "
    assert flag in done.stdout
    assert flag in run("serve", "--help").stdout
    assert run(command, "-h").stdout == done.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("check", "--str=1", "."), "option '--strict' doesn't allow an argument"),
        (("check", "--strct", "."), "unrecognized option '--strct', did you mean '--strict'?"),
        (("config",), "the following arguments are required: MODEL_DIR|FILE"),
        (("config", "a", "--", "--b"), "Unexpected argument: --b"),
        (("version", "x"), "Unexpected argument: x"),
        (
            ("new", "d", "--kind=decopled"),
            """Bad option: "--kind"; invalid argument for --kind; got 'decopled', did you mean \
'decoupled'?; --kind <string>: One of plain, batched, decoupled, bls, image, onnx, chat. \
Default: plain""",
        ),
        (
            ("run", "m", "--co=x"),
            """Bad option: "--count"; Invalid option value. Got x; --count <integer>: Number of \
executions. Default: 1""",
        ),
    ],
    ids=["value", "misspelt", "nothing", "two", "one too many", "choice", "number"],
)
def test_every_command_reads_flags_as_serve_does_and_says_in_one_line_what_is_wrong(
    arguments: tuple[str, ...], error: str
) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"pbhost {arguments[0]}: {error}; See pbhost {arguments[0]} --help\n"


INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(("command", "module"), [("top", "http.client"), ("serve", "msgspec")])
def test_an_interrupt_while_modules_are_imported_ends_a_command_silently(
    command: str, module: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "INTERRUPTED": module}
    done = subprocess.run(
        [sys.executable, "-m", "pbhost", command], capture_output=True, env=env, timeout=DEADLINE
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_the_package_is_runnable_as_a_module() -> None:
    command = [sys.executable, "-m", "pbhost", "version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0
    assert done.stdout == run("version").stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("version",), 0, "pbhost "),
        (("check", "{models}"), 0, "1 model: 0 errors, 0 warnings"),
        (("config", "{models}/identity"), 0, 'name: "identity"'),
        (("run", "{models}/identity", "--input", "INPUT0=[1]"), 0, "OUTPUT0"),
        (("new", "{folder}/new"), 0, "{folder}/new/test_model.py"),
        (("doctor",), 0, "open files: "),
        (("models", "http://127.0.0.1:1", "list"), 1, "pbhost models: "),
        (("check", "models"), 2, "pbhost check: 'models' does not exist\n"),
        (("run", "models"), 1, "pbhost run: 'models' is not a model directory\n"),
        (("run", "."), 1, "pbhost run: "),
        (("serve", "--model-repository=models"), 1, "'models' does not exist"),
    ],
)
def test_commands_run_in_a_working_directory_that_is_gone(
    repository: RepositoryBuilder,
    tmp_path: Path,
    arguments: tuple[str, ...],
    status: int,
    said: str,
) -> None:
    repository.copy("identity")
    names = {"models": repository.path, "folder": tmp_path}
    done = run(*(text.format(**names) for text in arguments), under=without_directory(tmp_path))
    assert done.returncode == status, done.stderr
    assert said.format(**names) in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_repository_is_required_and_must_be_a_directory() -> None:
    done = run("serve")
    assert done.returncode == 1
    assert "--model-repository must be specified" in done.stderr
    done = run("serve", "--model-repository=/nowhere/at/all")
    assert done.returncode == 1
    assert "repository path is not a valid directory" in done.stderr


def test_a_repository_without_models_is_a_warning(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    host = serve(repository).wait_started()
    host.wait_for(f"no models in '{repository.path}': a model is a folder there")


def test_models_of_several_repositories_are_served(
    repository: RepositoryBuilder, serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = RepositoryBuilder(tmp_path_factory.mktemp("other"))
    repository.copy("identity")
    other.copy("misbehave")
    host = serve(repository, "--model-store", str(other.path), "--id", "me").wait_started()
    with host.client() as client:
        assert client.get_server_metadata().name == "me"
        assert {m.name for m in client.get_model_repository_index().models} == {
            "identity",
            "misbehave",
        }


def test_a_taken_port_ends_the_start(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity")
    first = serve(repository).wait_started()
    second = serve(repository, f"--grpc-port={first.port}")
    assert second.process.wait(DEADLINE) == 1
    assert f"Socket '127.0.0.1:{first.port}' already in use" in second.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_what_runs_and_finalizes_the_models(
    repository: RepositoryBuilder, serve: Serve, number: signal.Signals, tmp_path: object
) -> None:
    go = f"{tmp_path}/go"
    source = f"""
    import os
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            print("waiting")
            until(lambda: os.path.exists({go!r}), "the word to continue")
            return [pb_utils.InferenceResponse([]) for _ in requests]

        def finalize(self):
            print("finalized")
    """
    repository.add("waits", UNTIL_SOURCE + dedent(source))
    host = serve(repository, "--exit-timeout-secs=600").wait_started()
    with host.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.infer, "waits", [])
        host.wait_for("waiting")
        host.process.send_signal(number)
        host.wait_for(rf"Signal \({number.value}\) received")
        host.wait_for("Found 1 gRPC service connections")  # from then on, others are refused
        status, _ = infer_error(client.infer, "waits", [])
        assert status == "StatusCode.UNAVAILABLE"
        with open(go, "w"):
            pass
        answer.result(DEADLINE)
    assert host.stop() == 0
    assert "finalized" in host.output


def test_a_signal_during_loading_ends_the_start(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = """
    import threading

    class TritonPythonModel:
        def initialize(self, args):
            print("loading forever")
            threading.Event().wait()
    """
    repository.add("slow", source)
    host = serve(repository)
    host.wait_for("loading forever")
    assert host.stop(signal.SIGINT) == 0
    assert not host.stubs()


def test_strict_readiness_can_be_relaxed(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity")
    repository.add("broken", "import no_such_library\n")
    host = serve(repository, "--exit-on-error=false", "--strict-readiness=false").wait_started()
    with host.client() as client:
        assert client.is_server_ready()


def test_log_switches_are_obeyed(repository: RepositoryBuilder, serve: Serve) -> None:
    source = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            logger = pb_utils.Logger
            logger.log("Specific Msg!", logger.INFO)
            logger.log_info("Info Msg!")
            logger.log_warn("Warning Msg!")
            logger.log_error("Error Msg!")
            logger.log_verbose("Verbose Msg!")
            return [pb_utils.InferenceResponse([]) for _ in requests]
    """
    repository.add("talks", source)
    host = serve(repository, "--log-verbose=1", "--log-warning=false").wait_started()
    with host.client() as client:
        client.infer("talks", [])
    host.wait_for("Verbose Msg!")
    host.stop()
    for text, count in {"Specific": 1, "Info": 1, "Warning": 0, "Error": 1, "Verbose": 1}.items():
        assert host.output.count(f"{text} Msg!") == count, text


def test_statistics_count_what_was_done(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("misbehave")
    host = serve(repository).wait_started()
    with host.client() as client:
        for _ in range(3):
            run_command(client, "echo x")
        infer_error(run_command, client, "raises x")
        infer_error(client.infer, "misbehave", [tensor("COMMAND", np.ones(1, dtype=np.int8))])
        (stats,) = client.get_inference_statistics("misbehave").model_stats
    assert (stats.name, stats.version) == ("misbehave", "1")
    assert stats.inference_count == 3
    assert stats.execution_count == 4
    assert stats.inference_stats.success.count == 3
    assert stats.inference_stats.fail.count == 1
    assert stats.inference_stats.queue.count == 3
    assert stats.inference_stats.compute_infer.ns > 0
    assert [(batch.batch_size, batch.compute_infer.count) for batch in stats.batch_stats] == [
        (1, 4)
    ]


def test_an_order_of_magnitude_more_instances_start_and_stop(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    config = repository.path / "identity" / "config.pbtxt"
    config.write_text(config.read_text() + "instance_group [ { count: 12 } ]")
    host = serve(repository).wait_started()
    assert len(host.stubs()) == 12
    with host.client() as client:
        array = np.ones(4, dtype=np.float32)
        client.infer("identity", [tensor("INPUT0", array)])
    assert host.stop() == 0


def test_streams_of_ordinary_models_answer_in_order(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    host = serve(repository).wait_started()
    results: list[object] = []
    with host.client() as client:
        client.start_stream(lambda result, error: results.append(error or result))
        for number in range(50):
            array = np.full(number + 1, number, dtype=np.float32)
            client.async_stream_infer("identity", [tensor("INPUT0", array)], request_id=str(number))
        client.stop_stream()
    ids = [r.get_response().id for r in results if isinstance(r, grpcclient.InferResult)]
    assert ids == [str(number) for number in range(50)]


def test_loading_shows_its_progress_on_a_terminal(repository: RepositoryBuilder) -> None:
    repository.copy("identity", "misbehave")
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "pbhost", "serve", f"--model-repository={repository.path}"),
            *("--grpc-port=0", "--grpc-address=127.0.0.1", "--metrics-port=0"),
            "--allow-http=false",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        shown = b""
        while b"loaded 0/2" not in shown:
            ready, _, _ = select.select([ours], [], [], DEADLINE)
            assert ready, shown
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
    os.close(ours)
