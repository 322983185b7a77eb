"""`pbhost models`, `wait`, `chat` and `doctor`, and what commands that ask a server share."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.servers import free_port
from host.cli.arguments import DEFAULT_URL, parse_texts, parse_with_others
from host.cli.ray import _SERVER_FLAGS, RayOptions, server_arguments
from host.cli.top import TopOptions
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, run_pbhost, wait_until
from tests.openai_models import add_models


def run(*arguments: str, given: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command; like a person's, its process has no flags in its environment."""
    return run_pbhost(*arguments, given=given, env=env)


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("misbehave")
    add_models(module_repository)
    flags = ("--model-control-mode=explicit", "--load-model=*")
    return module_serve(module_repository, *flags).wait_started()


@pytest.fixture
def url(host: RunningHost) -> str:
    return f"http://{host.http_url}"


def listed(url: str, *arguments: str) -> list[dict[str, Any]]:
    done = run("models", url, "list", "--format=json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_models_are_listed_loaded_and_unloaded(url: str) -> None:
    done = run("models", url, "list", "identity", "misbehave")
    assert done.returncode == 0
    assert done.stdout.split("\n")[1].split("|")[1].strip() == "Model"
    ready = {"name": "identity", "version": "1", "state": "READY", "reason": ""}
    assert ready in listed(url)
    done = run("models", url, "unload", "identity")
    assert (done.returncode, done.stdout) == (0, "unloaded identity\n")
    assert ready not in listed(url, "identity")
    done = run("models", url, "load", "identity", "misbehave")
    assert (done.returncode, done.stdout) == (0, "loaded identity\nloaded misbehave\n")
    assert listed(url, "identity") == [ready]


def test_a_model_that_cannot_be_loaded_is_one_line(url: str) -> None:
    done = run("models", url, "load", "nope")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("pbhost models: failed to load 'nope'")
    assert done.stderr.count("\n") == 1
    for arguments, text in (
        (("drop",), "expected list, load or unload, got 'drop'"),
        (("load",), "the following arguments are required: MODEL"),
        ((), "the following arguments are required: list|load|unload"),
    ):
        done = run("models", url, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"pbhost models: {text}; See pbhost models --help\n"


def test_wait_returns_when_all_is_ready_or_the_time_is_over(url: str) -> None:
    assert run("wait", url).returncode == 0
    assert run("wait", url, "--model=identity", "--model=misbehave").returncode == 0
    done = run("wait", url, "--model=nope", "--timeout=0.3")
    assert (done.returncode, done.stdout) == (1, "")
    said = f"pbhost wait: {url}/v2/models/nope is not ready after 0.3 s: "
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    nowhere = f"http://127.0.0.1:{free_port()}"
    done = run("wait", nowhere, "--timeout=0")
    assert done.returncode == 1
    assert f"{nowhere} is not ready after 0 s: no answer" in done.stderr
    done = run("wait", "localhost:8000")
    assert (done.returncode, done.stderr) == (
        2,
        "pbhost wait: expected http://HOST:PORT, got 'localhost:8000'\n",
    )


def test_a_server_that_starts_is_waited_for(repository: RepositoryBuilder, serve: Serve) -> None:
    port = free_port()
    command = [sys.executable, "-m", "pbhost", "wait", f"http://127.0.0.1:{port}"]
    with subprocess.Popen([*command, f"--timeout={DEADLINE}"]) as process:
        repository.copy("identity")
        serve(repository, f"--http-port={port}")
        assert process.wait(DEADLINE) == 0


def test_a_chat_has_one_answer_for_each_line(url: str, host: RunningHost) -> None:
    done = run("chat", url, "letters", given="abc\n\nde\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2
    done = run("chat", url, "nope", given="a\nb\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("pbhost chat: ")
    assert done.stderr.count("\n") == 1
    assert "nope" in done.stderr
    assert "{" not in done.stderr  # of the error's JSON


def test_a_chat_prints_no_escape_sequences_of_the_model(url: str) -> None:
    done = run("chat", url, "letters", given="a\x1b[2J|\tb\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "a\\x1b[2J\tb" in done.stdout


def test_an_interrupt_ends_a_chat_whose_input_is_no_terminal(url: str, host: RunningHost) -> None:
    before = host.output.count("waiting")
    command = [sys.executable, "-m", "pbhost", "chat", url, "letters"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"a|WAIT|c\nb\n")
        process.stdin.close()
        wait_until(lambda: host.output.count("waiting") > before, "the request")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 1
        assert process.stdout is not None
        assert b"c" not in process.stdout.read()


def test_a_chat_whose_reader_has_gone_ends_silently(url: str) -> None:
    command = [sys.executable, "-m", "pbhost", "chat", url, "letters"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.close()
        process.stdin.write(b"a\nb\n")
        process.stdin.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(DEADLINE) == 1


def test_a_failed_request_is_the_status_of_a_chat_at_a_terminal(url: str) -> None:
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "pbhost", "chat", url, "letters"]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        for text, answered in ((b"a|FAIL|c\n", b""), (b"\x04", b"the model is tired")):
            said = b""
            while answered not in said or not said.endswith(b"> "):
                assert select.select([ours], [], [], DEADLINE)[0]
                said += os.read(ours, 1000)
            os.write(ours, text)
        wait_until(lambda: process.poll() is not None, "the end of the chat")
        os.close(ours)
        assert process.returncode == 1


def test_timeouts_and_urls_that_cannot_be_are_refused_at_once(url: str) -> None:
    for command in (
        ("models", url, "list", "--timeout=1e12"),
        ("chat", url, "m", "--timeout=1e12"),
        ("wait", url, "--timeout=1e12"),
        ("wait", "http://localhost:99999"),
        ("wait", "http://local host:8000"),
        ("wait", "http://"),
        ("wait", url, "--header=a b: c"),
    ):
        done = run(*command)
        assert (done.returncode, done.stdout) == (2, ""), command
        assert done.stderr.count("\n") == 1


def test_no_server_is_one_line() -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    for command in (("models", nowhere, "list"), ("chat", nowhere, "m"), ("top", nowhere)):
        done = run(*command, given="hello\n")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"pbhost {command[0]}: no answer from {nowhere}: ")
        assert done.stderr.count("\n") == 1


def test_top_prints_json(url: str) -> None:
    done = run("top", url, "--once", "--interval=1", "--format=json", "--model=identity")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    (model,) = json.loads(line)["models"]
    assert (model["name"], model["version"], model["state"]) == ("identity", 1, "READY")
    assert model["p50_us"] is None


def test_doctor_tells_of_this_machine_and_keeps_secrets() -> None:
    secret = {"PBHOST_API_KEY_FILE": "hidden-1", "OTEL_EXPORTER_OTLP_HEADERS": "hidden-2"}
    secret |= {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://me:hidden-3@collector:4318",
        "PBHOST_TRACE_CONFIG": "opentelemetry,url=hidden-4",
        "PBHOST_SET": "a.b=hidden-5",
        "PBHOST_BACKEND_CONFIG": "python,x=hidden-6",
        "PBHOST_OTHER": "user_password=hidden-7",
    }
    done = run("doctor", **secret, CUDA_VISIBLE_DEVICES="7")
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("profile-guided optimisation: ", "open files: ", "numpy: ", "/dev/shm: "):
        assert text in done.stdout
    assert "CUDA_VISIBLE_DEVICES: 7" in done.stdout
    assert "PBHOST_API_KEY_FILE: (left out)" in done.stdout
    assert "OTEL_EXPORTER_OTLP_ENDPOINT: https://(left out)@collector:4318" in done.stdout
    assert "hidden" not in done.stdout
    as_json = json.loads(run("doctor", "--format=json", **secret).stdout)
    assert as_json["pbhost"]["version"] in done.stdout
    assert isinstance(as_json["advice"], list)


def test_a_url_may_be_left_out() -> None:
    def parse(synopsis: str, *given: str) -> list[str]:
        return parse_texts(given, synopsis, "", TopOptions)[0]

    assert parse("top [URL]") == [DEFAULT_URL]
    assert parse("top [URL]", "localhost:1") == ["localhost:1"]  # the command says what is wrong
    assert parse("infer [URL] MODEL", "m") == [DEFAULT_URL, "m"]
    assert parse("infer [URL] MODEL", "grpc://h:1", "m") == ["grpc://h:1", "m"]
    assert parse("models [URL] A [MODEL] ...", "load", "m", "n") == [DEFAULT_URL, "load", "m", "n"]
    assert parse("models [URL] A [MODEL] ...", "http://h:1", "list") == ["http://h:1", "list"]
    assert parse("crashes [URL|DIRECTORY]", "folder") == ["folder"]


def test_formats_of_another_command_are_refused(tmp_path: Path) -> None:
    for command, given, known in (
        ("check", "yaml", "text or json"),
        ("config", "text", "yaml or json"),
    ):
        done = run("ray", command, str(tmp_path), f"--format={given}")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"pbhost ray: expected {known} as --format of {command}\n"


def test_applications_on_ray_take_the_flags_of_servers(tmp_path: Path) -> None:
    words, options, flags = parse_with_others(
        ["config", str(tmp_path), "--load-model=a", "--load-model", "b", "--strict-readiness=false",
         "--disable-auto-complete-config", "--argument=id=x", "--http-port=1"],
        "ray check|config|run REPOSITORY ...", "", RayOptions, _SERVER_FLAGS,
    )  # fmt: skip
    assert options.http_port == 1
    assert server_arguments(words[1:], options, flags) == {
        "model_repository": [str(tmp_path)],
        "load_model": ["a", "b"],
        "strict_readiness": "false",
        "disable_auto_complete_config": "true",
        "id": "x",
    }
