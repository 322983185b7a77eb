"""Ensembles and their members, as they are loaded and unloaded.

What is loaded again or unloaded, because of what, and every text, is as a Triton 2.51 does it for
ensembles of Python models.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.clients import Client, infer_error
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.control_models import index
from tests.integration.ensemble_models import (
    Step,
    add_ensemble,
    add_member,
    config_of,
    send_request,
)

READY = [("1", "READY", "")]
UNLOADED = [("1", "UNAVAILABLE", "unloaded")]
PLUS_ONE = 'return {"A": x + 1}'


def one(member: str) -> list[Step]:
    """An ensemble of a single step."""
    return [(member, {"X": "I"}, {"A": "O"})]


def simple(repository: RepositoryBuilder, name: str, code: str = PLUS_ONE, **options: Any) -> None:
    """A member with one input and one output."""
    add_member(repository, name, code, **{"inputs": "X", "outputs": "A", **options})


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    """Explicit mode; these members are not loaded yet."""
    repository = module_repository
    simple(repository, "a")
    simple(repository, "b")
    simple(repository, "c")
    simple(repository, "batches", batch=8)
    simple(repository, "two_inputs", inputs="X Y", dims="4")
    simple(repository, "stream", 'return [{"A": x}]', decoupled=True)
    add_ensemble(repository, "of_a", "I", "O", one("a"))
    add_ensemble(repository, "of_of_a", "I", "O", [("of_a", {"I": "I"}, {"O": "O"})])
    add_ensemble(repository, "of_a_and_b", "I", "O", chain("a", "b"))
    repository.add("broken", "raise ValueError('no good')\n", "backend: 'python'")
    repository.add("no_config", config="what is this")
    return module_serve(repository, "--model-control-mode=explicit").wait_started()


def chain(first: str, second: str) -> list[Step]:
    """Two steps."""
    return [(first, {"X": "I"}, {"A": "t"}), (second, {"X": "t"}, {"A": "O"})]


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client
        for name in ("of_of_a", "of_a", "of_a_and_b", "a", "b", "c"):
            client.unload_model(name)
        names = ("of_of_a", "of_a", "of_a_and_b", "a", "b", "c")
        wait_until(lambda: not any(is_there(client, name) for name in names), "the models to go")


def gone(client: Client, name: str) -> None:
    """Returns once the model is unloaded."""
    wait_until(lambda: index(client, name) == UNLOADED, f"{name} to be gone")


def is_there(client: Client, name: str) -> bool:
    """Whether a version is not, or not yet, gone."""
    return any(state in ("READY", "UNLOADING") for _, state, _ in index(client, name))


# Ensembles that do not fit their members

FAULTS: dict[str, tuple[str, str]] = {
    "unknown": (
        config_of("I", "O", chain("missing", "none")),
        "ensemble {m} contains models that are not available or ambiguous: missing, none",
    ),
    "unreadable": (
        config_of("I", "O", one("no_config")),
        "ensemble {m} contains models that are not available or ambiguous: no_config",
    ),
    "itself": (
        config_of("I", "O", [("itself", {"I": "I"}, {"O": "O"})]),
        "circular dependency between ensembles: {m} -> ... -> {m} -> {m}",
    ),
    "failed": (
        config_of("I", "O", one("broken")),
        ("ensemble '{m}' depends on 'broken' which has no loaded version. Model 'broken' loading"
        " failed with error: version 1 is at UNAVAILABLE state: Internal: ValueError: no good"),
    ),
    "invalid": (
        config_of("I", "O", [("unknown", {"I": "I"}, {"O": "O"})]),
        ("ensemble '{m}' depends on 'unknown' which is not valid. Model 'unknown' failed with"
        " error: ensemble unknown contains models that are not available or ambiguous: missing,"
        " none"),
    ),
    "version_9": (
        config_of("I", "O", one("a"), version=9),
        "ensemble '{m}' depends on 'a' whose required version 9 is not loaded.",
    ),
    "no_version": (
        config_of("I", "O", one("a"), version=0),
        "ensemble '{m}' depends on 'a' whose required version 0 is not loaded.",
    ),
    "too_large": (
        config_of("I", "O", one("batches"), batch=16),
        ("ensemble {m} allows maximum batch size 16, but it contains model batches which only"
        " allows maximum batch size to be 8"),
    ),
    "no_such_input": (
        config_of("I", "O", [("a", {"Z": "I"}, {"A": "O"})]),
        "in ensemble {m}, ensemble tensor I is mapping to non-existing input Z in model a",
    ),
    "unmapped": (
        config_of("I", "O", one("two_inputs")),
        "in ensemble {m}, input Y in model two_inputs is not mapped to any ensemble tensors",
    ),
    "no_such_output": (
        config_of("I", "O", [("a", {"X": "I"}, {"Z": "O"})]),
        "in ensemble {m}, ensemble tensor O is mapped from non-existing output Z in model a",
    ),
    "type": (
        config_of("I:TYPE_INT32", "O", one("a")),
        ("in ensemble {m}, ensemble tensor I: inconsistent data type: TYPE_INT32 is inferred from"
        " model {m} while TYPE_FP32 is inferred from model a"),
    ),
    "shape": (
        config_of("I", "O", [("two_inputs", {"X": "I", "Y": "I"}, {"A": "O"})], dims="5"),
        ("in ensemble {m}, ensemble tensor I: inconsistent shape: [5] is inferred from model {m}"
        " while [4] is inferred from model two_inputs"),
    ),
    "streams": (
        config_of(
            "I", "O",
            [("stream", {"X": "I"}, {"A": "t"}),
             ("two_inputs", {"X": "t", "Y": "I"}, {"A": "O"})],
        ),
        ("in ensemble {m}, step of model 'two_inputs' receives inputs originated from different"
        " decoupled models"),
    ),
    "cached_stream": (
        config_of("I", "O", one("stream"), extra="response_cache { enable: true }"),
        ("version 1 is at UNAVAILABLE state: Invalid argument: Response Cache does not currently"
        " support model {m} with 'decoupled' transaction policy. Please disable the response"
        " cache."),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_an_ensemble_that_does_not_fit_is_refused(
    module_repository: RepositoryBuilder, client: Client, name: str
) -> None:
    module_repository.add("unknown", config=FAULTS["unknown"][0])
    module_repository.add(name, config=FAULTS[name][0])
    status, text = infer_error(client.load_model, name)
    assert status == "StatusCode.INVALID_ARGUMENT"
    expected = FAULTS[name][1].replace("{m}", name)
    assert text.startswith(f"load failed for model '{name}': {expected}")
    assert text.endswith("\n")


def test_ensembles_that_are_made_of_each_other_are_refused(
    module_repository: RepositoryBuilder, client: Client
) -> None:
    for name, other in (("hen", "egg"), ("egg", "hen")):
        add_ensemble(module_repository, name, "I", "O", [(other, {"I": "I"}, {"O": "O"})])
    assert infer_error(client.load_model, "hen")[1] == (
        "load failed for model 'hen': circular dependency between ensembles: hen -> ... -> egg ->"
        " hen\n"
    )


def test_a_model_that_loads_its_own_ensemble_at_its_start_is_told_so(
    module_repository: RepositoryBuilder, client: Client
) -> None:
    starting = """
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def initialize(self, args):
                pb_utils.load_model("of_eager")
            def execute(self, requests):
                raise AssertionError
        """
    config = 'backend: "python"' + " ".join(
        f'{kind} {{ name: "{name}", data_type: TYPE_FP32, dims: [ -1 ] }}'
        for kind, name in (("input", "X"), ("output", "A"))
    )
    module_repository.add("eager", starting, config)
    add_ensemble(module_repository, "of_eager", "I", "O", one("eager"))
    assert "circular dependency" in infer_error(client.load_model, "eager")[1]
    # Whichever of the two sees the cycle first, neither waits forever.
    _, text = infer_error(client.load_model, "of_eager")
    assert "would wait for itself" in text or "circular dependency" in text


# Explicit mode


def test_members_are_loaded_with_their_ensemble_and_stay_when_it_goes(client: Client) -> None:
    client.load_model("of_of_a")
    assert index(client, "a") == index(client, "of_a") == index(client, "of_of_a") == READY
    assert send_request(client, "of_of_a", I=[1]) == {"O": [2]}
    client.unload_model("of_of_a")
    wait_until(lambda: index(client, "of_of_a") == UNLOADED, "the ensemble to be gone")
    assert index(client, "a") == index(client, "of_a") == READY


def test_dependents_go_with_their_ensemble(client: Client) -> None:
    client.load_model("of_of_a")
    client.unload_model("of_of_a", unload_dependents=True)
    for name in ("of_of_a", "of_a", "a"):
        gone(client, name)


def test_a_member_that_another_ensemble_needs_stays(client: Client) -> None:
    client.load_model("of_a")
    client.load_model("of_a_and_b")
    client.unload_model("of_a_and_b", unload_dependents=True)
    wait_until(lambda: index(client, "b") == UNLOADED, "the other member to be gone")
    assert index(client, "a") == index(client, "of_a") == READY


def test_a_member_that_was_loaded_by_name_stays(client: Client) -> None:
    client.load_model("of_a_and_b")
    client.load_model("b")
    client.unload_model("of_a_and_b", unload_dependents=True)
    wait_until(lambda: index(client, "a") == UNLOADED, "the implicit member to be gone")
    assert index(client, "b") == READY


def test_an_ensemble_goes_with_its_member_and_comes_back_with_it(client: Client) -> None:
    client.load_model("of_of_a")
    client.unload_model("a")
    for name in ("of_of_a", "of_a", "a"):
        gone(client, name)
    assert infer_error(send_request, client, "of_a", I=[1]) == (
        "StatusCode.NOT_FOUND",
        "Request for unknown model: 'of_a' has no available versions",
    )
    client.load_model("a")
    assert index(client, "a") == index(client, "of_a") == index(client, "of_of_a") == READY


def test_an_ensemble_that_was_unloaded_by_name_stays_away(client: Client) -> None:
    client.load_model("of_of_a")
    client.unload_model("of_a")
    wait_until(lambda: index(client, "of_of_a") == UNLOADED, "its ensembles to be unloaded")
    client.unload_model("a")
    client.load_model("a")
    assert index(client, "of_a") in (UNLOADED, [("1", "UNLOADING", "")])
    client.load_model("of_a")
    assert index(client, "of_of_a") == READY


def test_a_member_that_changes_has_its_ensembles_loaded_anew(
    module_repository: RepositoryBuilder, client: Client, host: RunningHost
) -> None:
    client.load_model("of_of_a")
    assert send_request(client, "of_of_a", I=[1]) == {"O": [2]}
    lines = len(host.lines)
    simple(module_repository, "a", 'return {"A": x + 2}')
    client.load_model("a")
    assert send_request(client, "of_of_a", I=[1]) == {"O": [3]}
    loaded = [line for line in host.lines[lines:] if "successfully loaded" in line]
    assert [line.split("'")[1] for line in loaded] == ["a", "of_a", "of_of_a"]
    simple(module_repository, "a")


def test_an_ensemble_that_no_longer_fits_goes_until_it_does(
    module_repository: RepositoryBuilder, client: Client, host: RunningHost
) -> None:
    client.load_model("of_of_a")
    simple(module_repository, "a", kind="TYPE_INT32")
    client.load_model("a")
    for name in ("of_of_a", "of_a"):
        gone(client, name)
    assert index(client, "a") == READY
    host.wait_for("failed to load 'of_a': Invalid argument: in ensemble of_a, ensemble tensor I")
    simple(module_repository, "a")
    client.load_model("a")
    assert index(client, "of_a") == index(client, "of_of_a") == READY


def test_the_old_ensemble_serves_on_when_its_change_is_invalid(
    module_repository: RepositoryBuilder, client: Client
) -> None:
    """Triton unloads it; here a load that fails leaves what served."""
    client.load_model("of_a")
    add_ensemble(module_repository, "of_a", "I", "O", [("a", {"Z": "I"}, {"A": "O"})])
    infer_error(client.load_model, "of_a")
    assert send_request(client, "of_a", I=[1]) == {"O": [2]}
    add_ensemble(module_repository, "of_a", "I", "O", one("a"))
    client.load_model("of_a")


def test_an_override_makes_an_ensemble_of_other_members(
    module_repository: RepositoryBuilder, client: Client
) -> None:
    client.load_model("of_a")
    config = {
        "platform": "ensemble",
        "input": [{"name": "I", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "O", "data_type": "TYPE_FP32", "dims": [-1]}],
        "ensemble_scheduling": {
            "step": [
                {"model_name": name, "model_version": -1, "input_map": {"X": given},
                 "output_map": {"A": made}}
                for name, given, made in (("a", "I", "t"), ("c", "t", "O"))
            ]
        },
    }  # fmt: skip
    client.load_model("of_a", config=json.dumps(config))
    assert index(client, "c") == READY
    assert send_request(client, "of_a", I=[1]) == {"O": [3]}
    simple(module_repository, "a", 'return {"A": x + 2}')
    client.load_model("a")  # has the ensemble loaded again, and of the same members
    assert send_request(client, "of_a", I=[1]) == {"O": [4]}
    simple(module_repository, "a")
    client.load_model("a")
    client.unload_model("c")
    wait_until(lambda: index(client, "of_a") == UNLOADED, "the ensemble to be gone")


def test_a_running_request_holds_its_members(
    module_repository: RepositoryBuilder, client: Client, host: RunningHost
) -> None:
    """A member that is unloaded while a step before it runs still runs its step, and is unloaded
    then.
    """
    folder = module_repository.path
    simple(
        module_repository, "slow",
        f'Path("{folder}/slow").touch()\nwait_for("{folder}/go")\nreturn {{"A": x}}',
    )  # fmt: skip
    simple(module_repository, "last")
    add_ensemble(module_repository, "slow_then_last", "I", "O", chain("slow", "last"))
    client.load_model("slow_then_last")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(send_request, client, "slow_then_last", I=[1])
        wait_until((folder / "slow").exists, "the first step")
        client.unload_model("last")
        assert index(client, "last") == [("1", "UNLOADING", "")]
        (folder / "go").touch()
        assert asked.result(DEADLINE) == {"O": [2]}
    for name in ("slow_then_last", "last"):
        gone(client, name)


# Other modes


def test_at_the_start_members_are_loaded_first_and_a_bad_ensemble_is_in_the_table(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    simple(repository, "z")
    add_ensemble(repository, "a_of_b", "I", "O", [("b_of_z", {"I": "I"}, {"O": "O"})])
    add_ensemble(repository, "b_of_z", "I", "O", one("z"))
    add_ensemble(repository, "lonely", "I", "O", one("missing"))
    add_ensemble(repository, "hen", "I", "O", [("egg", {"I": "I"}, {"O": "O"})])
    add_ensemble(repository, "egg", "I", "O", [("hen", {"I": "I"}, {"O": "O"})])
    host = serve(repository, "--exit-on-error=false").wait_started()
    loaded = [line.split("'")[1] for line in host.lines if "successfully loaded" in line]
    assert loaded == ["z", "b_of_z", "a_of_b"]
    assert "ensemble lonely contains models that are not available or ambiguous: missing" in (
        host.output
    )
    for name, other in (("hen", "egg"), ("egg", "hen")):
        host.wait_for(f"circular dependency between ensembles: {name} -> ... -> {other} -> {name}")
    assert host.output.count("loading: z:1") == 1
    with host.client() as client:
        assert send_request(client, "a_of_b", I=[1]) == {"O": [2]}
        assert index(client, "lonely") == [("", "", "")]


def test_polls_follow_members(repository: RepositoryBuilder, serve: Serve) -> None:
    simple(repository, "z")
    add_ensemble(repository, "of_z", "I", "O", one("z"))
    host = serve(repository, "--model-control-mode=poll", "--repository-poll-secs=1").wait_started()
    with host.client() as client:
        assert send_request(client, "of_z", I=[1]) == {"O": [2]}
        simple(repository, "z", 'return {"A": x + 2}')
        wait_until(lambda: send_request(client, "of_z", I=[1]) == {"O": [3]}, "the changed member")
        aside = Path(shutil.move(repository.path / "z", repository.path.parent / "z"))
        wait_until(lambda: index(client, "of_z") == UNLOADED, "the ensemble to go")
        shutil.move(aside, repository.path / "z")
        wait_until(lambda: index(client, "of_z") == READY, "the ensemble to return")
        assert send_request(client, "of_z", I=[1]) == {"O": [3]}
