"""Loading and unloading at the request of clients."""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2 as pb

from tests.clients import infer_error, run_command
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.control_models import CONFIG, JSON, index, model, starting

EXPLICIT = "--model-control-mode=explicit"


def loaded(name: str, problem: str) -> tuple[str, str]:
    return "StatusCode.INVALID_ARGUMENT", f"load failed for model '{name}': {problem}\n"


def not_polled(name: str) -> tuple[str, str]:
    text = f"failed to load '{name}', failed to poll from model repository"
    return "StatusCode.INTERNAL", text


@pytest.fixture
def host(repository: RepositoryBuilder, serve: Serve) -> Iterator[RunningHost]:
    """A host with explicit control that serves `asker`; `x` is on disk."""
    repository.add("asker", model("asker"), CONFIG)
    repository.add("x", model("x"), CONFIG)
    host = serve(repository, EXPLICIT, "--load-model=asker").wait_started()
    yield host


def uploads(host: RunningHost) -> list[Path]:
    """Model directories of uploaded files that the host has now."""
    found = Path(os.environ["TMPDIR"]).glob("pbhost-*/model-*")
    return [path for path in found if path.is_dir()]


# Configurations and files in load requests


def test_files_of_a_load_are_the_model_until_a_plain_load(host: RunningHost) -> None:
    files = {
        "file:1/model.py": ("from helper import text\n" + model("uploaded")).encode(),
        "file:/1/./helper.py": b"text = 'helped'\n",
        "file:2/../notes/config.txt": b"",
    }
    with host.client() as client:
        client.load_model("x")
        before = run_command(client, "where", "x")
        client.load_model("x", config=JSON, files=files)
        assert run_command(client, "name", "x") == "uploaded"
        directory = Path(run_command(client, "where", "x"))
        assert (directory / "notes" / "config.txt").exists()
        assert {path.name for path in directory.iterdir()} == {"1", "notes"}
        for path in (directory, directory.parent):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert uploads(host) == [directory]

        client.load_model("x", config=JSON, files=files)
        again = Path(run_command(client, "where", "x"))
        assert again != directory
        wait_until(lambda: uploads(host) == [again], "the replaced files to be removed")

        client.load_model("x")
        assert run_command(client, "name", "x") == "x"
        assert run_command(client, "where", "x") == before
        wait_until(lambda: not uploads(host), "the files to be removed")


def test_files_of_a_load_may_be_a_model_that_is_not_on_disk(host: RunningHost) -> None:
    with host.client() as client:
        client.load_model("new", config=JSON, files={"file:7/model.py": model("new").encode()})
        assert run_command(client, "name", "new") == "new"
        assert client.is_model_ready("new", "7")
        assert index(client, "new") == []
        client.unload_model("new")
        wait_until(lambda: not uploads(host), "the files to be removed")
        assert infer_error(client.load_model, "new") == not_polled("new")


def test_a_killed_instance_is_started_again_from_uploaded_files(host: RunningHost) -> None:
    with host.client() as client:
        client.load_model("x", config=JSON, files={"file:1/model.py": model("up").encode()})
        pid = run_command(client, "pid", "x")
        os.kill(int(pid), 9)
        host.wait_for("restarted")
        assert run_command(client, "name", "x") == "up"
        assert run_command(client, "pid", "x") != pid


def test_a_failed_load_with_files_leaves_the_old_version_and_no_files(host: RunningHost) -> None:
    with host.client() as client:
        client.load_model("x")
        pid = run_command(client, "pid", "x")
        status, text = infer_error(
            client.load_model, "x", config=JSON, files={"file:1/model.py": b"def broken(:\n"}
        )
        assert status == "StatusCode.INVALID_ARGUMENT"
        assert text.startswith(
            "load failed for model 'x': version 1 is at UNAVAILABLE state: Internal: SyntaxError"
        )
        assert text.endswith(";\n")
        assert run_command(client, "pid", "x") == pid
        assert index(client, "x") == [("1", "READY", "")]
        assert client.is_server_ready()
        host.wait_for("failed to load 'x' version 1: Internal: SyntaxError")
        assert not uploads(host)
        aborting = starting("os.abort()").encode()
        status, text = infer_error(
            client.load_model, "x", config=JSON, files={"file:1/model.py": aborting}
        )
        assert "is not healthy" in text
        assert not uploads(host)
        assert run_command(client, "pid", "x") == pid
        client.load_model("x")
        assert run_command(client, "pid", "x") == pid, "the plain load had nothing to undo"


def test_a_killed_host_leaves_no_files_to_the_next_one_that_takes_files(
    host: RunningHost, repository: RepositoryBuilder, serve: Serve
) -> None:
    files = {"file:1/model.py": model("up").encode()}
    with host.client() as client:
        client.load_model("x", config=JSON, files=files)
    left = uploads(host)
    assert left
    host.stop(9)
    again = serve(repository, EXPLICIT).wait_started()
    with again.client() as client:
        client.load_model("x", config=JSON, files=files)
        assert not set(left) & set(uploads(again))


def test_a_configuration_holds_until_the_models_files_change(
    host: RunningHost, repository: RepositoryBuilder
) -> None:
    with host.client() as client:
        client.load_model("x")
        parameters = {"key": {"string_value": "value"}}
        config = {**json.loads(JSON), "parameters": parameters}
        client.load_model("x", config=json.dumps(config))
        first = run_command(client, "pid", "x")
        assert client.get_model_config("x").config.parameters
        client.load_model("x", config=str(config))  # which clients send, too, and Triton takes
        assert run_command(client, "pid", "x") == first, "nothing is other than it was"
        client.load_model("x")
        assert run_command(client, "pid", "x") == first, "nor now"
        assert infer_error(client.load_model, "x", config="{")[0] == "StatusCode.INTERNAL"
        client.load_model("x")
        assert client.get_model_config("x").config.parameters
        repository.write(repository.path / "x" / "config.pbtxt", "# other\n" + CONFIG)
        client.load_model("x")
        assert run_command(client, "pid", "x") != first
        assert not client.get_model_config("x").config.parameters
        client.load_model("x", config=json.dumps(config))
        client.unload_model("x")
        host.wait_for("successfully unloaded 'x'")
        client.load_model("x")
        assert not client.get_model_config("x").config.parameters


GOOD = {"file:1/model.py": b""}


@pytest.mark.parametrize(
    ("config", "files", "detail"),
    [
        (
            JSON,
            {"file:1/../../model.py": b""},
            (
                "Invalid file parameter 'file:1/../../model.py' with normalized path '../model.py'"
                " must stay within model directory."
            ),
        ),
        (
            JSON,
            {"file:/../etc/passwd": b""},
            (
                "Invalid file parameter 'file:/../etc/passwd' with normalized path"
                " '../etc/passwd' must stay within model directory."
            ),
        ),
        (
            JSON,
            {"file:": b""},
            (
                "Invalid file parameter 'file:' with normalized path '.' must stay within model"
                " directory."
            ),
        ),
        (
            JSON,
            {"file:1": b"", "file:1/model.py": b""},
            "Invalid file parameter 'file:1/model.py', directory has been created as a file",
        ),
        (None, GOOD, "Load parameter 'config' must be specified for model file override"),
        ("{", GOOD, "Invalid config override: "),
        (
            json.dumps({"name": "y", "backend": "python"}),
            GOOD,
            "unexpected directory name 'x' for model 'y', directory name must equal model name",
        ),
    ],
)
def test_a_bad_override_fails_the_poll_and_the_log_says_why(
    host: RunningHost, config: str | None, files: dict[str, bytes], detail: str
) -> None:
    with host.client() as client:
        refused = infer_error(client.load_model, "x", config=config, files=files)
        assert refused == not_polled("x")
        host.wait_for(rf"failed to load 'x': (Internal|Invalid argument): {re.escape(detail)}")
        assert not uploads(host)
        assert index(client, "x") == [("", "", "")]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (
            "config",
            pb.ModelRepositoryParameter(bytes_param=b"{}"),
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            "file:1/model.py",
            pb.ModelRepositoryParameter(string_param=""),
            "invalid value type for load parameter 'file:1/model.py', expected bytes_param.",
        ),
        (
            "files",
            pb.ModelRepositoryParameter(bytes_param=b""),
            "unrecognized load parameter 'files'.",
        ),
    ],
)
def test_load_parameters_have_their_types(
    host: RunningHost, key: str, value: pb.ModelRepositoryParameter, text: str
) -> None:
    with host.client() as client:
        request = pb.RepositoryModelLoadRequest(model_name="x", parameters={key: value})
        with pytest.raises(grpcclient.grpc.RpcError) as caught:
            client._client_stub.RepositoryModelLoad(request)
        assert caught.value.code() is grpcclient.grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == text


def test_names_of_loads_are_names(host: RunningHost) -> None:
    invalid = "StatusCode.INVALID_ARGUMENT"
    traversal = "model name must not contain path traversal characters"
    with host.client() as client:
        for name in ("", "  "):
            assert infer_error(client.load_model, name) == (
                invalid,
                "Model name cannot be empty. Please enter a valid name to deploy.",
            )
        for name in ("..", "a/b", " ../x "):
            text = f"invalid model name '{name.strip()}', {traversal}"
            assert infer_error(client.load_model, name) == (invalid, text)
        for name in ("missing", ".", ".git"):
            assert infer_error(client.load_model, name) == not_polled(name)
        host.wait_for("failed to poll model 'missing': model not found in any model repository.")


# Unloading


def test_requests_under_way_end_well_while_their_model_is_unloaded(
    host: RunningHost, tmp_path: Path
) -> None:
    answers: list[str] = []
    go = tmp_path / "go"
    with host.client() as client, host.client() as other:
        client.load_model("x")
        asking = threading.Thread(
            target=lambda: answers.append(run_command(other, f"wait {go}", "x"))
        )
        asking.start()
        host.wait_for("waiting")
        client.unload_model("x")
        assert index(client, "x") == [("1", "UNLOADING", "")]
        assert infer_error(run_command, client, "name", "x") == (
            "StatusCode.NOT_FOUND",
            "Request for unknown model: 'x' has no available versions",
        )
        assert infer_error(client.get_model_metadata, "x", "1") == (
            "StatusCode.UNAVAILABLE",
            "Request for unknown model: 'x' version 1 is not at ready state",
        )
        client.load_model("x")
        assert run_command(client, "name", "x") == "x", (
            "the next one need not wait for the last one"
        )
        assert not answers
        go.touch()
        asking.join()
        assert answers == ["waited"]
        client.unload_model("x")
        wait_until(
            lambda: index(client, "x") == [("1", "UNAVAILABLE", "unloaded")], "the unload to end"
        )
        assert client.is_server_ready()


def test_unloading_what_is_not_loaded_is_no_error(host: RunningHost) -> None:
    with host.client() as client:
        for name in ("x", "missing", ""):
            client.unload_model(name)
        client.unload_model("missing", unload_dependents=True)
        assert index(client, "x") == [("", "", "")]


@pytest.mark.parametrize("unloaded", ["slow", "above"])
def test_an_unload_comes_after_the_load_that_is_under_way(
    host: RunningHost, repository: RepositoryBuilder, tmp_path: Path, unloaded: str
) -> None:
    go = tmp_path / "go"
    body = f"""
        print("initializing", flush=True)
        until(lambda: os.path.exists({str(go)!r}), "the word to continue")
    """
    tensors = """
        input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
        output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
    """
    repository.add("slow", starting(body), f"backend: 'python' {tensors}")
    repository.add(
        "above",
        None,
        f"""
        platform: "ensemble" {tensors}
        ensemble_scheduling {{ step [ {{ model_name: "slow" model_version: -1
          input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "Y" }} }} ] }}
        """,
    )
    with host.client() as client, ThreadPoolExecutor(3) as pool:
        load = pool.submit(client.load_model, "above")
        host.wait_for("initializing")
        assert index(client, "slow") == [("1", "LOADING", "")]
        assert not client.is_server_ready()
        unload = pool.submit(client.unload_model, unloaded)
        client.load_model("x")  # another one has nothing to do with it
        client.unload_model("x")
        assert not unload.done()
        again = pool.submit(client.load_model, unloaded)
        go.touch()
        for done in (load, unload, again):
            done.result()
        assert client.is_model_ready(unloaded), "the last word is the load's"
        client.unload_model("slow")
        gone = [("1", "UNAVAILABLE", "unloaded")]
        wait_until(lambda: index(client, "slow") == gone, "the unload to end")
        wait_until(lambda: index(client, "above") == gone, "the ensemble to go with it")
        wait_until(lambda: not host.stubs("slow_0"), "its stub to end")


# Start-up


def test_all_models_of_all_repositories_are_loaded_by_a_star(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    second = RepositoryBuilder(tmp_path / "second")
    repository.add("x", model("x"), CONFIG)
    second.add("y", model("y"), CONFIG)
    host = serve(
        repository, f"--model-repository={second.path}", EXPLICIT, "--load-model=*"
    ).wait_started()
    with host.client() as client:
        assert [run_command(client, "name", name) for name in ("x", "y")] == ["x", "y"]
        assert client.is_server_ready()


def test_a_name_in_two_repositories_is_no_model(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    second = RepositoryBuilder(tmp_path / "second")
    for builder in (repository, second):
        builder.add("twice", model(), CONFIG)
    second.add("once", model("once"), CONFIG)
    more = f"--model-repository={second.path}"
    host = serve(repository, more, EXPLICIT, "--load-model=*").wait_started()
    host.wait_for("failed to poll model 'twice': not unique across all model repositories")
    with host.client() as client:
        assert run_command(client, "name", "once") == "once"
        assert infer_error(client.load_model, "twice") == not_polled("twice")
        reason = "model appears in two or more repositories"
        assert index(client, "twice") == [("", "UNAVAILABLE", reason)]
        ready = client.get_model_repository_index().models
        assert {m.name for m in ready} == {"twice", "once"}
        assert client.is_server_ready()
    host = serve(repository, more, EXPLICIT, "--load-model=twice")
    assert host.process.wait(DEADLINE) == 1
    host.wait_for("error: creating server: Internal - failed to load all models")


def test_a_repository_that_cannot_be_read_ends_the_start(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("x", model(), CONFIG)
    (repository.path / "link").symlink_to(repository.path / "nowhere")
    host = serve(repository)
    assert host.process.wait(DEADLINE) == 1
    assert (
        f"failed to poll model repository '{repository.path}': failed to stat file"
        f" {repository.path}/link" in host.output
    )
    host = serve(repository, EXPLICIT).wait_started()
    with host.client() as client:
        client.load_model("x")
        assert run_command(client, "name", "x") == "x"


def test_a_load_is_tried_again_as_often_as_told(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    tries = tmp_path / "tries"
    body = f"""
        with open({str(tries)!r}, "a") as file:
            file.write("x")
        if os.path.getsize({str(tries)!r}) < 3:
            raise ValueError("not yet")
    """
    repository.add("slow", starting(body), "backend: 'python'")
    host = serve(repository, "--model-load-retry-count=1")
    assert host.process.wait(DEADLINE) == 1
    assert tries.read_text() == "xx"
    assert "failed to load 'slow' version 1: Internal: ValueError: not yet" in host.output
    tries.unlink()
    host = serve(repository, "--model-load-retry-count=2").wait_started()
    assert tries.read_text() == "xxx"
    host.wait_for("tries left: 1")


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_models_load_at_a_time_as_there_are_threads(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path, threads: int
) -> None:
    body = f"""
        folder = {str(tmp_path)!r}
        mark = os.path.join(folder, "loading-" + args["model_name"])
        open(mark, "w").close()
        def loading():
            return sum(name.startswith("loading-") for name in os.listdir(folder))
        until(lambda: loading() >= {threads}, "the others")
        print("together:", loading())
        if {threads} == 1:
            os.remove(mark)
    """
    for name in ("a", "b"):
        repository.add(name, starting(body), "backend: 'python'")
    host = serve(repository, f"--model-load-thread-count={threads}").wait_started()
    wait_until(lambda: host.output.count(f"together: {threads}") == 2, "what both have printed")
