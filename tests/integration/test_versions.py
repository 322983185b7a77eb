"""Versions that come and go, and instances that do while their version serves."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from tests.clients import Client, infer_error, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.test_scheduling import Pipe

WHO = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.version = args["model_version"]
        if os.path.exists(os.path.join(args["model_repository"], self.name + ".fails")):
            raise RuntimeError("no " + self.name)

    def execute(self, requests):
        responses = []
        for request in requests:
            pipe = pb_utils.get_input_tensor_by_name(request, "PIPE").as_numpy()[0].decode()
            if pipe:
                open(pipe).read()
            text = f"{self.version} {self.name} {os.getpid()}".encode()
            answer = pb_utils.Tensor("WHO", np.array([text], dtype=object))
            responses.append(pb_utils.InferenceResponse([answer]))
        return responses
"""
CONFIG = """
backend: "python"
input [ {{ name: "PIPE" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "WHO" data_type: TYPE_STRING dims: [ 1 ] }} ]
instance_group [ {groups} ]
{more}
"""


def config(groups: str = "{ count: 1 }", more: str = "") -> str:
    return CONFIG.format(groups=groups, more=more)


def all_versions(groups: str = "{ count: 1 }") -> str:
    return config(groups, "version_policy { all { } }")


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    return module_serve(module_repository, "--model-control-mode=explicit").wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


class Model:
    """A model of the shared repository, named after its test."""

    def __init__(self, repository: RepositoryBuilder, host: RunningHost, client: Client) -> None:
        test = os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split(" ")[0]
        self.name = re.sub(r"\W", "_", test.removeprefix("test_"))[:48]  # titles may be cut
        self._repository = repository
        self._host = host
        self._client = client
        self.folder = repository.path / self.name

    def write(self, text: str, version: int = 1, model: str = WHO) -> None:
        self._repository.add(self.name, model, version=version)
        self.configure(text)

    def configure(self, text: str) -> None:
        """Writes the configuration alone."""
        (self.folder / "config.pbtxt").write_text(text)

    def load(self, **options: Any) -> None:
        self._client.load_model(self.name, **options)

    def who(self, version: str = "", pipe: str = "") -> str:
        text = tensor("PIPE", np.array([pipe.encode()], dtype=np.object_))
        with self._host.client() as client:
            answer = client.infer(self.name, [text], model_version=version, client_timeout=DEADLINE)
        told: bytes = answer.as_numpy("WHO")[0]
        return told.decode()

    def instances(self) -> dict[str, int]:
        """Processes by the names of their instances."""
        found: dict[str, int] = {}
        for child in psutil.Process(self._host.process.pid).children(recursive=True):
            try:
                line = " ".join(child.cmdline()).split()
            except psutil.NoSuchProcess:  # it has just ended
                continue
            if line[:1] == ["pbhost-stub"] and line[-1].startswith(self.name):
                found[line[-1]] = child.pid
        return found

    def index(self) -> list[tuple[str, str, str]]:
        return [
            (entry.version, entry.state, entry.reason)
            for entry in self._client.get_model_repository_index().models
            if entry.name == self.name
        ]


@pytest.fixture
def model(module_repository: RepositoryBuilder, host: RunningHost, client: Client) -> Model:
    return Model(module_repository, host, client)


TENSORS = config().replace('backend: "python"', "")


def test_the_version_that_is_loaded_decides_the_backend(model: Model) -> None:
    model.write(TENSORS, version=10)
    (model.folder / "9").mkdir()
    (model.folder / "9" / "model.onnx").touch()
    model.load()
    assert model.who().startswith("10 ")
    model.configure(TENSORS + "version_policy { specific { versions: 9 } }")
    (model.folder / "9" / "model.onnx").rename(model.folder / "10" / "model.onnx")
    (model.folder / "9" / "model.py").write_text(WHO)
    model.load()
    assert model.who().startswith("9 ")


def test_versions_of_different_kinds_are_refused_with_both_names(
    model: Model, host: RunningHost
) -> None:
    model.write(TENSORS + "version_policy { all {} }", version=2)
    (model.folder / "1").mkdir()
    (model.folder / "1" / "model.onnx").touch()
    with pytest.raises(InferenceServerException):
        model.load()
    host.wait_for(
        re.escape(
            f"versions 1 and 2 of model '{model.name}' are of different kinds: '1/model.onnx' needs"
            " the backend 'onnxruntime', and '2/model.py' the backend 'python'"
        )
    )


def test_new_instances_are_added_beside_the_existing_ones(model: Model, client: Client) -> None:
    model.write(config("{ count: 1 }"))
    model.load()
    before = model.instances()
    model.configure(config("{ count: 3 }"))
    model.load()
    after = model.instances()
    assert set(after) == {f"{model.name}_0_{number}" for number in range(3)}
    assert before.items() <= after.items()
    (group,) = client.get_model_config(model.name).config.instance_group
    assert group.count == 3
    asked = {model.who() for _ in range(3)}
    assert asked


def test_surplus_instances_go_and_the_others_stay(model: Model) -> None:
    model.write(config("{ count: 3 }"))
    model.load()
    before = model.instances()
    model.configure(config("{ count: 1 }"))
    model.load()
    first = f"{model.name}_0_0"
    wait_until(lambda: model.instances() == {first: before[first]}, "the others to end")
    assert model.who() == f"1 {first} {before[first]}"


def test_load_returns_when_idle_surplus_instances_have_run_finalize(
    model: Model, tmp_path: Path
) -> None:
    path, log = tmp_path / "pipe", tmp_path / "finalized"
    finalizes = f"""
    def finalize(self):
        if not os.path.exists({str(log)!r}):
            open({str(path)!r}).read()
            open({str(log)!r}, "w").close()
"""
    model.write(config("{ count: 2 }"), model=WHO + finalizes)
    model.load()
    model.configure(config("{ count: 1 }"))
    with ThreadPoolExecutor(1) as pool, Pipe(path) as pipe:
        load = pool.submit(model.load)
        wait_until(pipe.reached, "finalize to run")
        assert model.who().split()[1] == f"{model.name}_0_0"
        assert not load.done()
        pipe.let_go()
        load.result(DEADLINE)
    assert log.exists()
    assert list(model.instances()) == [f"{model.name}_0_0"]


ENSEMBLE = """
platform: "ensemble"
input [ {{ name: "PIPE" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "WHO" data_type: TYPE_STRING dims: [ 1 ] }} ]
ensemble_scheduling {{
  step [ {{ model_name: "{name}" model_version: -1
    input_map {{ key: "PIPE" value: "PIPE" }} output_map {{ key: "WHO" value: "WHO" }} }} ]
}}
"""


@pytest.mark.parametrize("of", ["model", "ensemble"])
def test_a_load_waits_for_a_busy_surplus_instance_and_requests_go_on(
    model: Model, client: Client, tmp_path: Path, of: str
) -> None:
    log = tmp_path / "finalized"
    finalizes = f"""
    def finalize(self):
        open({str(log)!r}, "w").close()
"""
    model.write(config("{ count: 2 }"), model=WHO + finalizes)
    loaded = model.name
    if of == "ensemble":
        loaded = f"of_{model.name}"
        (model.folder.parent / loaded / "1").mkdir(parents=True)
        text = ENSEMBLE.format(name=model.name)
        (model.folder.parent / loaded / "config.pbtxt").write_text(text)
    client.load_model(loaded)
    stays, goes = f"{model.name}_0_0", f"{model.name}_0_1"
    with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        pipes = [stack.enter_context(Pipe(tmp_path / str(number))) for number in range(2)]
        answers = [pool.submit(model.who, "", str(pipes[0].path))]
        wait_until(pipes[0].reached, "one instance to be busy")
        if model.who().split()[1] == goes:
            answers.append(pool.submit(model.who, "", str(pipes[1].path)))
            wait_until(pipes[1].reached, "both instances to be busy")
            pipes[0].let_go()
            assert answers.pop(0).result(DEADLINE).split()[1] == stays
            del pipes[0]
        model.configure(config("{ count: 1 }"))
        load = pool.submit(client.load_model, loaded)
        wait_until(
            lambda: client.get_model_config(model.name).config.instance_group[0].count == 1,
            "the load to proceed",
        )
        assert model.who().split()[1] == stays
        assert not load.done() and not log.exists()
        pipes[0].let_go()
        assert answers[0].result(DEADLINE).split()[1] == goes
        load.result(DEADLINE)
    assert log.exists()
    assert list(model.instances()) == [stays]


def test_a_load_by_a_busy_surplus_instance_returns(model: Model) -> None:
    """Each of both instances loads its model with one instance less."""
    loads = WHO.replace(
        "        responses = []",
        f"""\
        import json

        wanted = json.loads(self.config)
        wanted["instance_group"][0]["count"] = 1
        pb_utils.load_model({model.name!r}, config=json.dumps(wanted))
        responses = []""",
    ).replace(
        "    def initialize(self, args):",
        """\
    def initialize(self, args):
        self.config = args["model_config"]""",
    )
    model.write(config("{ count: 2 }"), model=loads)
    model.load()
    assert model.who()
    assert model.who()


def test_no_request_is_refused_while_instances_are_added_and_removed(model: Model) -> None:
    model.write(config("{ count: 1 }"))
    model.load()
    over = threading.Event()
    count = 0

    def send_request() -> None:
        nonlocal count
        while not over.is_set():
            model.who()
            count += 1

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(send_request)
        try:
            for number in (2, 1, 2):
                model.configure(config(f"{{ count: {number} }}"))
                model.load()
        finally:
            over.set()
        asking.result(DEADLINE)
    assert count


def test_changed_instance_groups_get_new_instances(model: Model) -> None:
    model.write(config("{ name: 'a' count: 1 }"))
    model.load()
    named = {f"{model.name}_one_0", f"{model.name}_b_0"}
    model.configure(
        config(
            f"{{ name: '{model.name}_one' kind: KIND_CPU count: 1 }},"
            f"{{ name: '{model.name}_b' kind: KIND_MODEL count: 1 }}"
        )
    )
    model.load()
    wait_until(lambda: set(model.instances()) <= named, "other names")


def test_an_instance_that_fails_does_not_affect_the_serving_ones(model: Model) -> None:
    model.write(config("{ count: 1 }"))
    new = f"{model.name}_0_1"
    (model.folder / f"{new}.fails").touch()
    model.load()
    before = model.instances()
    model.configure(config("{ count: 2 }"))
    status, text = infer_error(model.load)
    assert "version 1 is at READY state: Internal: " in text
    assert f"no {new}" in text
    wait_until(lambda: model.instances() == before, "the new ones to be gone")
    assert model.who().split()[2] == str(before[f"{model.name}_0_0"])
    ((_, state, told),) = model.index()
    assert state == "READY"
    assert told.startswith("Internal: ") and f"no {new}" in told
    model.configure(config("{ count: 1 } "))
    model.load()
    assert model.index() == [("1", "READY", "")]
    assert model.instances() == before


def test_a_policy_change_does_not_reload_the_versions_that_stay(model: Model) -> None:
    for version in (1, 2, 3):
        model.write(config(), version)
    model.load()
    assert [version for version, state, _ in model.index() if state == "READY"] == ["3"]
    third = model.who("3")
    model.configure(all_versions())
    model.load()
    assert [version for version, *_ in model.index()] == ["1", "2", "3"]
    assert model.who("3") == third
    first = model.who("1")
    model.configure(config(more="version_policy { specific { versions: [ 1, 3 ] } }"))
    model.load()
    wait_until(lambda: ("2", "UNAVAILABLE", "unloaded") in model.index(), "the second to go")
    assert (model.who("1"), model.who("3")) == (first, third)
    assert model.who() == third


def test_a_new_version_does_not_touch_the_others(model: Model) -> None:
    model.write(all_versions(), 1)
    model.load()
    first = model.who("1")
    model.write(all_versions(), 2)
    model.load()
    assert model.who("2").startswith("2 ")
    assert model.who("1") == first
    (model.folder / "2" / "model.py").unlink()
    (model.folder / "2").rmdir()
    model.load()
    wait_until(lambda: ("2", "UNAVAILABLE", "unloaded") in model.index(), "the second to go")
    assert model.who() == first


def test_a_change_in_one_version_reloads_that_one(model: Model) -> None:
    for version in (1, 2):
        model.write(all_versions(), version)
    model.load()
    before = [model.who("1"), model.who("2")]
    (model.folder / "2" / "model.py").write_text(WHO + "# changed\n")
    model.load()
    assert model.who("1") == before[0]
    assert model.who("2") != before[1]


@pytest.mark.parametrize("change", ["file", "parameter"])
def test_any_other_change_reloads_all_versions(model: Model, change: str) -> None:
    for version in (1, 2):
        model.write(all_versions(), version)
    model.load()
    before = [model.who("1"), model.who("2")]
    if change == "file":
        (model.folder / "labels.txt").write_text("a\n")
    else:
        model.configure(all_versions() + 'parameters { key: "a" value: { string_value: "b" } }')
    model.load()
    assert all(
        now != then for now, then in zip([model.who("1"), model.who("2")], before, strict=False)
    )


def test_a_configuration_that_comes_with_a_load_changes_instances_as_well(model: Model) -> None:
    model.write(config())
    sent = {
        "backend": "python",
        "input": [{"name": "PIPE", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "WHO", "data_type": "TYPE_STRING", "dims": [1]}],
        "instance_group": [{"count": 1}],
    }
    model.load(config=json.dumps(sent))
    before = model.instances()
    model.load(config=json.dumps({**sent, "instance_group": [{"count": 2}]}))
    assert before.items() < model.instances().items()


def test_a_model_that_was_unloaded_is_loaded_anew(model: Model, client: Client) -> None:
    model.write(config())
    model.load()
    before = model.who()
    client.unload_model(model.name)
    wait_until(lambda: model.index() == [("1", "UNAVAILABLE", "unloaded")], "its end")
    model.load()
    assert model.who() != before


def test_polls_change_instances_in_place(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.add("polled", WHO, config("{ count: 1 }"))
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    host = serve(repository, *flags).wait_started()

    def processes() -> list[int]:
        return [stub.pid for stub in host.stubs() if "polled" in " ".join(stub.cmdline())]

    (first,) = processes()
    repository.add("polled", config=config("{ count: 2 }"))
    wait_until(lambda: len(processes()) == 2, "the second instance")
    assert first in processes()
