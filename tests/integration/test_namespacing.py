"""Models of one name in two repositories, as a Triton 2.51 has them with `--model-namespacing`."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.ensemble_models import add_ensemble, add_member

AMBIGUOUS = (
    "There are 2 identifiers of model 'twin' in global map, model namespace must be provided to"
    " resolve ambiguity."
)
STEP = [("twin", {"X": "I"}, {"A": "O"})]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """`twin` adds 1 in the first repository, 2 in the second."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("first", "second"))
    for number, root in enumerate((first, second), 1):
        repository = RepositoryBuilder(root)
        member(repository, "twin", number)
        member(repository, f"only_{number}", 10 * number)
        add_ensemble(repository, f"of_twin_{number}", "I", "O", STEP)
    add_ensemble(RepositoryBuilder(first), "far", "I", "O", [("only_2", {"X": "I"}, {"A": "O"})])
    return first, second


@pytest.fixture(scope="module")
def host(roots: tuple[Path, Path], module_serve: Serve) -> RunningHost:
    """Explicit mode, all loaded."""
    return module_serve(
        roots[0],
        f"--model-repository={roots[1]}",
        "--model-namespacing=true",
        "--model-control-mode=explicit",
        "--load-model=*",
    ).wait_started()


def member(repository: RepositoryBuilder, name: str, addend: int) -> None:
    add_member(repository, name, f'return {{"A": x + {addend}}}', inputs="X", outputs="A")


def post(host: RunningHost, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and answer."""
    data = None if body is None and path.endswith(("ready", "config", "stats")) else body or {}
    request = urllib.request.Request(
        f"http://{host.http_url}/v2/{path}",
        None if data is None else json.dumps(data).encode(),
    )
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as response:
            text = response.read()
            return response.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        text = error.read()
        return error.code, json.loads(text).get("error") if text else None


def add(host: RunningHost, model: str, name: str = "I") -> Any:
    """The result of the model for 0, or its error."""
    tensor = {"name": name, "datatype": "FP32", "shape": [1], "data": [0]}
    status, answer = post(host, f"models/{model}/infer", {"inputs": [tensor]})
    return answer["outputs"][0]["data"][0] if status == 200 else (status, answer)


def states(host: RunningHost) -> list[tuple[str, str]]:
    return [(e["name"], e.get("state", "")) for e in post(host, "repository/index")[1]]


def test_each_is_in_the_index(host: RunningHost) -> None:
    names = [name for name, state in states(host) if state == "READY"]
    assert names == ["far", "of_twin_1", "only_1", "twin", "of_twin_2", "only_2", "twin"]


def test_a_name_that_several_have_is_refused_and_another_one_is_not(host: RunningHost) -> None:
    assert add(host, "twin", "X") == (400, AMBIGUOUS)
    assert post(host, "models/twin/config") == (400, AMBIGUOUS)
    assert post(host, "models/twin/stats") == (400, "requested model 'twin' is not available")
    assert add(host, "only_1", "X") == 10
    assert post(host, "models/only_2/stats")[1]["model_stats"][0]["name"] == "only_2"


def test_an_unknown_name_is_an_invalid_argument(host: RunningHost) -> None:
    assert add(host, "nope") == (400, "Request for unknown model: 'nope' is not found")


def test_an_identity_is_no_name(host: RunningHost, roots: tuple[Path, Path]) -> None:
    known = f"{roots[0]}::only_1"
    escaped = known.replace("/", "%2F")
    assert add(host, escaped, "X") == (400, f"Request for unknown model: '{known}' is not found")


def test_an_ensemble_is_made_of_what_lies_beside_it_or_else_of_the_only_one(
    host: RunningHost, roots: tuple[Path, Path]
) -> None:
    assert [add(host, name) for name in ("of_twin_1", "of_twin_2", "far")] == [1, 2, 20]
    for name, root in (("of_twin_1", roots[0]), ("of_twin_2", roots[1]), ("far", roots[1])):
        config = post(host, f"models/{name}/config")[1]
        assert config["ensemble_scheduling"]["step"][0]["model_namespace"] == str(root)


def test_series_say_the_repository(host: RunningHost, roots: tuple[Path, Path]) -> None:
    url = f"http://{host.metrics_url}/metrics"
    with urllib.request.urlopen(url, timeout=DEADLINE) as response:
        text = response.read().decode()
    for root in roots:
        assert f'nv_inference_count{{model="twin",namespace="{root}",version="1"}}' in text


def test_a_load_and_an_unload_are_of_all_that_have_the_name(
    host: RunningHost, roots: tuple[Path, Path]
) -> None:
    assert post(host, "repository/models/twin/unload")[0] == 200
    gone = {"twin", "of_twin_1", "of_twin_2"}
    assert all((state == "READY") == (name not in gone) for name, state in states(host))
    assert add(host, "twin", "X") == (400, "Request for unknown model: 'twin' is not found")
    files = [root / "twin" / "1" / "model.py" for root in roots]
    good = [path.read_text() for path in files]
    for path in files:
        path.write_text("raise ValueError('no good')")
    status, text = post(host, "repository/models/twin/load")
    lines = text.splitlines()
    assert status == 400
    assert [line.split("'")[1] for line in lines if line.startswith("load failed for model")] == [
        f"{root}::twin" for root in roots
    ]
    for path, code in zip(files, good, strict=True):
        path.write_text(code)
    assert post(host, "repository/models/twin/load")[0] == 200
    assert [add(host, name) for name in ("of_twin_1", "of_twin_2")] == [1, 2]


def test_a_later_model_makes_a_name_ambiguous_and_is_preferred_in_its_repository(
    host: RunningHost, roots: tuple[Path, Path]
) -> None:
    member(RepositoryBuilder(roots[0]), "only_2", 30)
    assert post(host, "repository/models/only_2/load")[0] == 200
    assert add(host, "only_2", "X")[0] == 400
    assert add(host, "far") == 30


def test_steps_that_could_mean_several_are_refused(
    host: RunningHost, roots: tuple[Path, Path], tmp_path: Path, serve: Serve
) -> None:
    add_ensemble(RepositoryBuilder(tmp_path), "lost", "I", "O", STEP)
    other = serve(
        tmp_path,
        *(f"--model-repository={root}" for root in roots),
        "--model-namespacing=true",
        "--model-control-mode=explicit",
    ).wait_started()
    assert post(other, "repository/models/lost/load") == (
        400,
        (
            f"load failed for model '{tmp_path}::lost': ensemble {tmp_path}::lost contains models"
            " that are not available or ambiguous: twin\n"
        ),
    )


# Poll mode


def test_a_change_in_one_repository_does_not_affect_the_others(
    tmp_path: Path, serve: Serve
) -> None:
    first, second = (RepositoryBuilder(tmp_path / name) for name in ("first", "second"))
    for number, repository in enumerate((first, second), 1):
        repository.path.mkdir()
        member(repository, "twin", number)
        add_ensemble(repository, f"of_twin_{number}", "I", "O", STEP)
    host = serve(
        first,
        f"--model-repository={second.path}",
        "--model-namespacing=true",
        "--model-control-mode=poll",
        "--repository-poll-secs=1",
    ).wait_started()

    def answers(*expected: Any) -> bool:
        return [add(host, f"of_twin_{number}") for number in (1, 2)] == list(expected)

    def ready(name: str) -> int:
        return states(host).count((name, "READY"))

    assert answers(1, 2)
    pids = {stub.pid for stub in host.stubs()}
    member(first, "twin", 5)
    wait_until(lambda: answers(5, 2), "the change in the first repository")
    wait_until(lambda: len(host.stubs()) == 2, "the end of the one before")
    assert len(pids & {stub.pid for stub in host.stubs()}) == 1, "the other twin is as it was"

    member(first, "new", 7)
    wait_until(lambda: ready("new") == 1, "the new model")
    assert add(host, "new", "X") == 7
    member(second, "new", 8)
    wait_until(lambda: ready("new") == 2, "the one of the same name in the other repository")
    assert add(host, "new", "X")[0] == 400
    assert answers(5, 2)

    first.add("new", "raise ValueError('no good')")
    host.wait_for(f"failed to load '{first.path}::new' version 1|failed to load 'new' version 1")
    assert ready("new") == 2, "the earlier model still serves"

    shutil.rmtree(first.path / "new")
    wait_until(lambda: add(host, "new", "X") == 8, "the name to mean one model again")

    # The neighbour's twin goes: the ensemble beside it takes the only one that is left.
    shutil.rmtree(first.path / "twin")
    wait_until(lambda: add(host, "twin", "X") == 2, "the name to mean the other one")
    wait_until(lambda: answers(2, 2), "its ensemble to take the other one")
    member(first, "twin", 9)
    wait_until(lambda: answers(9, 2), "the first twin to return, to its neighbour")
    assert add(host, "twin", "X") == (400, AMBIGUOUS)
