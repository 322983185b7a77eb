"""Loading and unloading at the request of models."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients import Client, infer_error, run_command, run_script
from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.control_models import CONFIG, JSON, index, model, starting

EXPLICIT = "--model-control-mode=explicit"
BLANK = "backend: 'python'"


def call(client: Client, *call: Any, asked: str = "asker") -> str:
    """The result or the exception of a function of `pb_utils`, called in `execute`, as text."""
    return run_command(client, f"call {json.dumps(call)}", asked)


@pytest.fixture
def host(repository: RepositoryBuilder, serve: Serve) -> Iterator[RunningHost]:
    """A host with explicit control that serves `asker`; `x` is on disk."""
    repository.add("asker", model("asker"), CONFIG)
    repository.add("x", model("x"), CONFIG)
    repository.copy("script")
    yield serve(
        repository, EXPLICIT, "--load-model=asker", "--model-load-thread-count=1"
    ).wait_started()


def test_a_model_loads_calls_and_unloads_another_model(host: RunningHost) -> None:
    with host.client() as client:
        assert call(client, "load_model", "x") == "None"
        assert call(client, "is_model_ready", "x") == "True"
        assert call(client, "is_model_ready", "x", "1") == "True"
        assert run_command(client, "name", "x") == "x"
        assert call(client, "unload_model", "x") == "None"
        assert call(client, "is_model_ready", "x").endswith("'x' has no available versions")
        wait_until(lambda: index(client, "x") == [("1", "UNAVAILABLE", "unloaded")], "the unload")
        assert call(client, "unload_model", "x", True) == "None"
        assert call(client, "unload_model", "missing") == "None"


def test_a_model_loads_with_configuration_and_files(host: RunningHost) -> None:
    with host.client() as client:
        files = {"file:1/model.py": model("up")}
        assert call(client, "load_model", "x", JSON, files) == "None"
        assert run_command(client, "name", "x") == "up"
        assert call(client, "load_model", "x", "", files).endswith(
            "failed to load 'x', failed to poll from model repository"
        )
        broken = {"file:1/model.py": "def broken(:"}
        text = call(client, "load_model", "x", JSON, broken)
        assert text.startswith("Failed to load model: ")
        assert "load failed for model 'x': version 1 is at UNAVAILABLE state: Internal: " in text
        assert run_command(client, "name", "x") == "up", "a failed load changes nothing"
        assert call(client, "load_model", "x") == "None"
        assert run_command(client, "name", "x") == "x"


def test_a_missing_model_is_not_ready(host: RunningHost) -> None:
    wrong = "version should be an integral value > 0"
    bad = "failed to get model version from specified version string"
    with host.client() as client:
        call(client, "load_model", "x")
        call(client, "unload_model", "x")
        for arguments, text in {
            ("missing",): "Request for unknown model: 'missing' is not found",
            ("missing", "1"): "Request for unknown model: 'missing' is not found",
            ("x",): "Request for unknown model: 'x' has no available versions",
            ("x", "1"): "Request for unknown model: 'x' version 1 is not at ready state",
            ("asker", "7"): "Request for unknown model: 'asker' version 7 is not found",
            ("asker", "y"): f"{bad} 'y' (details: stol), {wrong}",
            ("asker", "9" * 30): f"{bad} '{'9' * 30}' (details: stol), {wrong}",
            ("asker", "-1"): f"{bad} '-1', {wrong}",
        }.items():
            answer = call(client, "is_model_ready", *arguments)
            assert answer.startswith("Failed to check model readiness: "), arguments
            assert answer.endswith(text), arguments


@pytest.mark.parametrize(
    "asking",
    [
        "return [one.exec().error().message() for one in requests]",
        "return [numbers(one.exec(decoupled=True)) for one in requests]",
        "return [(await one.async_exec()).error().message() for one in requests]",
        "return [numbers(await one.async_exec(decoupled=True)) for one in requests]",
    ],
)
def test_requests_to_missing_models_fail_with_the_reason(host: RunningHost, asking: str) -> None:
    source = f"""
    targets = [("missing", -1), ("missing", 1), ("x", -1), ("x", 1), ("script", 7)]
    requests = [ask(name, model_version=version) for name, version in targets]
    {asking}
    """
    with host.client() as client:
        client.load_model("script")
        call(client, "load_model", "x")
        call(client, "unload_model", "x")
        errors = [text[0] if type(text) is list else text for text in run_script(client, source)]
    assert errors == [
        f"Model {name} - Error when running inference: Request for unknown model: '{name}'{reason}"
        for name, reason in [
            ("missing", " is not found"),
            ("missing", " is not found"),
            ("x", " has no available versions"),
            ("x", " version 1 is not at ready state"),
            ("script", " version 7 is not found"),
        ]
    ]


def test_a_model_may_replace_and_unload_itself(host: RunningHost) -> None:
    with host.client() as client:
        pid = run_command(client, "pid", "asker")
        other = json.dumps({**json.loads(JSON), "parameters": {"x": {"string_value": "another"}}})
        assert call(client, "load_model", "asker", other) == "None"
        assert run_command(client, "pid", "asker") != pid
        assert call(client, "unload_model", "asker") == "None"
        assert infer_error(run_command, client, "pid", "asker")[1].endswith(
            "has no available versions"
        )


def test_a_load_outlives_the_model_that_requested_it(
    host: RunningHost, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    body = f"""
        print("initializing", flush=True)
        until(lambda: os.path.exists({str(go)!r}), "the word to continue")
    """
    repository.add("slow", starting(body), BLANK)
    with host.client() as client, host.client() as other:
        asking = threading.Thread(
            target=lambda: infer_error(call, other, "load_model", "slow"),
        )
        asking.start()
        host.wait_for("initializing")
        host.stubs("asker_0")[0].kill()
        asking.join()
        go.touch()
        wait_until(lambda: index(client, "slow") == [("1", "READY", "")], "the load to end")


def test_other_control_modes_refuse_models(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.add("asker", model("asker"), CONFIG)
    refusal = "explicit model load / unload is not allowed if polling is enabled"
    for mode in ("none", "poll"):
        host = serve(repository, f"--model-control-mode={mode}").wait_started()
        with host.client() as client:
            for function in ("load_model", "unload_model"):
                assert call(client, function, "asker").endswith(refusal)
            assert call(client, "is_model_ready", "asker") == "True"
        host.stop()


def test_model_control_must_wait_for_the_end_of_the_start(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    body = """
        for call in ('["load_model", "x"]', '["unload_model", "x"]', '["is_model_ready", "x"]'):
            print("told:", attempt(call))
    """
    repository.add("early", starting(body), BLANK)
    host = serve(repository, EXPLICIT, "--load-model=*").wait_started()
    for begin in ("load model", "unload model", "check model readiness"):
        host.wait_for(f"told: Failed to {begin}: .*Server not ready")


# Loads that wait for loads


def test_initialize_may_load_models_even_if_only_one_may_load_at_a_time(
    host: RunningHost, repository: RepositoryBuilder
) -> None:
    """Two instances load the same model, which loads another one."""
    body = """print("told:", attempt('["load_model", "NAME"]'))"""
    repository.add("a", starting(body.replace("NAME", "b")), BLANK + " instance_group { count: 2 }")
    repository.add("b", starting(body.replace("NAME", "x")), BLANK)
    with host.client() as client:
        client.load_model("a")
        for name in ("a", "b", "x"):
            assert client.is_model_ready(name)
        wait_until(lambda: host.output.count("told: None") == 3, "three answers")


def test_initialize_may_wait_for_a_load_that_a_client_has_begun(
    host: RunningHost, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    body = f"""
        print("initializing", flush=True)
        until(lambda: os.path.exists({str(go)!r}), "the word to continue")
        print("told:", attempt('["load_model", "x"]'))
    """
    repository.add("a", starting(body), BLANK)
    with host.client() as client, host.client() as other:
        loads = [
            threading.Thread(target=client.load_model, args=["a"]),
            threading.Thread(target=other.load_model, args=["x"]),
        ]
        loads[0].start()
        host.wait_for("initializing")
        loads[1].start()
        host.wait_for("loading: x:1")  # and it waits, as `a` has the only slot
        go.touch()
        for load in loads:
            load.join()
        host.wait_for("told: None")


def test_initialize_cannot_load_its_own_model(
    host: RunningHost, repository: RepositoryBuilder
) -> None:
    repository.add("a", starting("""print(attempt('["load_model", "a"]'))"""), BLANK)
    with host.client() as client:
        client.load_model("a")
        assert client.is_model_ready("a")
        host.wait_for(
            "load failed for model 'a': 'initialize' of model 'a' requests it, and would wait for"
            " itself: a -> a"
        )


def test_a_cycle_of_loads_is_refused_where_it_closes(
    host: RunningHost, repository: RepositoryBuilder
) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        body = f"""print("{name} told:", attempt('["load_model", "{other}"]'))"""
        repository.add(name, starting(body), BLANK)
    with host.client() as client:
        client.load_model("a")
        for name in ("a", "b", "c"):
            assert client.is_model_ready(name)
        host.wait_for("c told: .*load failed for model 'a': .*: c -> a -> b -> c")
        host.wait_for("b told: None")
        host.wait_for("a told: None")


def test_initialize_may_outdate_its_own_load(
    host: RunningHost, repository: RepositoryBuilder
) -> None:
    repository.add("a", starting("""print(attempt('["unload_model", "a"]'))"""), BLANK)
    with host.client() as client:
        assert infer_error(client.load_model, "a") == (
            "StatusCode.INVALID_ARGUMENT",
            (
                "load failed for model 'a': Newer operation has been applied to the model"
                " lifecycle, current load operation is out-dated.\n"
            ),
        )


HOLD = {"hold": True}
ENSEMBLE = """
    platform: "ensemble"
    input { name: "COMMAND" data_type: TYPE_STRING dims: 1 }
    output { name: "ANSWER" data_type: TYPE_STRING dims: 1 }
    ensemble_scheduling { step { model_name: "x" model_version: -1
      input_map { key: "COMMAND" value: "COMMAND" }
      output_map { key: "ANSWER" value: "ANSWER" } } }
"""


@pytest.fixture
def holding(repository: RepositoryBuilder, serve: Serve) -> Iterator[tuple[RunningHost, Client]]:
    """A host that serves the models `a` and `b`; `x` and the ensemble `pipe` of it are on disk."""
    for name in ("a", "b", "x"):
        repository.add(name, model(name), CONFIG)
    repository.add("pipe", config=ENSEMBLE)
    host = serve(repository, EXPLICIT, "--load-model=a", "--load-model=b").wait_started()
    with host.client() as client:
        yield host, client


def test_a_held_model_stays_loaded_until_its_last_holder_unloads_it(
    holding: tuple[RunningHost, Client],
) -> None:
    _, client = holding

    def unload(asker: str, name: str = "x") -> bool:
        assert call(client, "unload_model", name, asked=asker) == "None"
        return not client.is_model_ready("x")

    for asker in ("a", "b", "b"):
        assert call(client, "load_model", "x", HOLD, asked=asker) == "None"
    assert not unload("a")
    assert run_command(client, "name", "x") == "x"
    assert not unload("a"), "the holds of another model are not released"
    assert not unload("b")
    assert unload("b")

    # An ensemble that is held keeps its steps, and a failed load holds nothing.
    assert call(client, "load_model", "pipe", HOLD, asked="a") == "None"
    assert not unload("b")
    assert client.is_model_ready("pipe")
    assert not unload("a", "pipe")
    assert "failed to poll" in call(client, "load_model", "x", "{", HOLD, asked="a")
    assert unload("b")

    # Clients may unload what models hold.
    assert call(client, "load_model", "x", HOLD, asked="a") == "None"
    client.unload_model("x")
    assert not client.is_model_ready("x")


def test_an_instance_that_ends_releases_its_holds(holding: tuple[RunningHost, Client]) -> None:
    host, client = holding

    def is_gone() -> bool:
        return not client.is_model_ready("x")

    for asker in ("a", "b"):
        assert call(client, "load_model", "x", HOLD, asked=asker) == "None"
    (killed,) = host.stubs("a_0")
    killed.kill()
    wait_until(lambda: host.stubs("a_0") not in ([], [killed]), "the restart")
    assert not is_gone(), "the other model holds it"
    client.unload_model("b")
    wait_until(is_gone, "the last holder to end")

    client.load_model("x")
    assert call(client, "load_model", "x", HOLD, asked="a") == "None"
    client.unload_model("a")
    wait_until(lambda: index(client, "a") == [("1", "UNAVAILABLE", "unloaded")], "the unload")
    assert not is_gone(), "a client has loaded it"
    client.load_model("b")
    assert call(client, "unload_model", "x", asked="b") == "None"
    assert is_gone(), "no model holds it"
