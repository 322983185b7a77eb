"""Models whose configuration names repository agents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from tests.clients import Client, infer_error
from tests.conftest import RepositoryBuilder, RunningHost, Serve

MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return [None for _ in requests]
"""
SUM = hashlib.md5(MODEL.encode()).hexdigest()
AGENT = """
backend: "python"
model_repository_agents {{ agents [ {{ name: "{agent}"
  parameters {{ key: "{key}" value: "{value}" }} }} ] }}
"""


def config(key: str = "MD5:1/model.py", value: str = SUM, agent: str = "checksum") -> str:
    return AGENT.format(agent=agent, key=key, value=value)


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    return module_serve(
        module_repository, "--model-control-mode=explicit", "--repoagent-directory=/agents"
    ).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


@pytest.mark.parametrize("value", [SUM, SUM.upper()], ids=["lower", "upper"])
def test_a_model_whose_files_are_right_is_served(
    module_repository: RepositoryBuilder, client: Client, value: str
) -> None:
    module_repository.add("right", MODEL, config(value=value))
    client.load_model("right")
    assert client.is_model_ready("right")


def test_a_file_that_has_changed_is_not_loaded(
    module_repository: RepositoryBuilder, host: RunningHost, client: Client
) -> None:
    module_repository.add("changed", MODEL, config())
    client.load_model("changed")
    other = MODEL + "# another one\n"
    module_repository.add("changed", other)
    assert infer_error(client.load_model, "changed")[1] == (
        "failed to load 'changed', failed to poll from model repository"
    )
    found = hashlib.md5(other.encode()).hexdigest()
    host.wait_for(f"Mismatched MD5 hash for file 1/model.py, expect: {SUM}, got: {found}")
    assert client.is_model_ready("changed"), "the earlier version still serves"


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "unknown",
            config(agent="relocation"),
            (
                "unable to find 'libtritonrepoagent_relocation.so' for repo agent 'relocation',"
                " searched: /agents"
            ),
        ),
        (
            "missing",
            config("MD5:1/other.py"),
            "repo agent 'checksum': failed to read file 1/other.py: No such file or directory",
        ),
        (
            "outside",
            config("MD5:../x"),
            "repo agent 'checksum': file ../x is outside model directory",
        ),
        (
            "sha",
            config("SHA:1/model.py"),
            "repo agent 'checksum' takes parameters named 'MD5:<file>', got 'SHA:1/model.py'",
        ),
    ],
    ids=["unknown", "missing", "outside", "sha"],
)
def test_agents_that_can_do_nothing_fail_the_load(
    module_repository: RepositoryBuilder,
    host: RunningHost,
    client: Client,
    name: str,
    text: str,
    complaint: str,
) -> None:
    module_repository.add(name, MODEL, text)
    assert infer_error(client.load_model, name)[1] == (
        f"failed to load '{name}', failed to poll from model repository"
    )
    host.wait_for(f"failed to load '{name}': Invalid argument: {complaint}")
