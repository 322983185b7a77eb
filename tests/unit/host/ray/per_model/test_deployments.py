"""The options of deployments, from the configurations of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from host.ray.arguments import read_options
from host.ray.per_model.deployments import ingress_settings, model_deployments
from tests.conftest import RepositoryBuilder
from tests.integration.ensemble_models import CHAIN

BATCHING = "max_batch_size: 64 instance_group [{count: 3, kind: KIND_CPU}]"
ON_GPU = "instance_group [{count: 2, kind: KIND_GPU}]"
EXPLICIT = {"model_control_mode": "explicit"}
SEQUENCES = "max_batch_size: 4 sequence_batching {}"


@pytest.fixture
def models(repository: RepositoryBuilder) -> Path:
    repository.copy("identity")
    repository.add("batching", "", BATCHING)
    repository.add("on_gpu", "", ON_GPU)
    repository.add("sequences", "", SEQUENCES)
    repository.add("chain", "", CHAIN)
    return repository.path


def needed(settings: dict[str, Any]) -> tuple[float, int]:
    """CPUs and GPUs."""
    actor = settings["ray_actor_options"]
    return actor["num_cpus"], actor["num_gpus"]


def test_options_follow_from_the_configurations(models: Path) -> None:
    found = model_deployments(read_options({"model_repository": str(models)}), {})
    settings = {one.model: one.settings for one in found}
    assert [one.name for one in found] == [f"model-{name}" for name in sorted(settings)]
    assert {name: one["max_ongoing_requests"] for name, one in settings.items()} == {
        "identity": 32,
        "batching": 384,
        "on_gpu": 32,
        "sequences": 32,
        "chain": 256,
    }
    resources = {name: needed(one) for name, one in settings.items()}
    assert resources["batching"] == (0.3, 0)
    assert resources["on_gpu"] == (0.2, 1)
    assert resources["chain"] == (0.1, 0)
    assert [name for name, one in settings.items() if "request_router_config" in one] == [
        "sequences"
    ]


def test_given_options_come_first_and_scaling_gets_the_policy(models: Path) -> None:
    options = read_options({"model_repository": str(models), **EXPLICIT, "load_model": "identity"})
    scaling = {"min_replicas": 1, "max_replicas": 4}
    given = {"identity": {"autoscaling_config": scaling, "max_ongoing_requests": 7}}
    (only,) = model_deployments(options, given)
    assert only.settings["max_ongoing_requests"] == 7
    policy = {"policy_function": "host.ray.autoscaling:choose_replicas"}
    assert only.settings["autoscaling_config"] == {"policy": policy, **scaling}
    assert ingress_settings(options, {"num_replicas": 2})["num_replicas"] == 2


@pytest.mark.parametrize(
    ("arguments", "given", "text"),
    [
        ({**EXPLICIT, "load_model": "missing"}, {}, "model 'missing' is not in the repository"),
        ({}, {"missing": {}}, "model 'missing' is not in the repository"),
        ({"model_namespacing": True}, {}, "model_namespacing: each model needs a name"),
    ],
)
def test_what_cannot_be_deployed_is_named(
    models: Path, arguments: dict[str, object], given: dict[str, dict[str, object]], text: str
) -> None:
    options = read_options({"model_repository": str(models), **arguments})
    with pytest.raises(ValueError, match=text):
        model_deployments(options, given)


@pytest.mark.parametrize(
    ("groups", "gpus", "cpus"),
    [
        ("{kind: KIND_GPU gpus: [0, 1]}", 2, 0.2),
        ("{kind: KIND_GPU count: 2 gpus: [1]}, {kind: KIND_CPU}", 2, 0.3),
        ("{gpus: [0]}", 1, 0.1),
        ("{kind: KIND_GPU count: 2}, {kind: KIND_GPU gpus: [0, 1, 2]}", 3, 0.5),
        ("{kind: KIND_CPU count: 2}", 0, 0.2),
    ],
)
def test_a_replica_has_the_gpus_that_its_groups_name(
    models: Path, groups: str, gpus: int, cpus: float
) -> None:
    (models / "on_gpu" / "config.pbtxt").write_text(f"instance_group [{groups}]")
    options = read_options({"model_repository": str(models), **EXPLICIT, "load_model": "on_gpu"})
    (only,) = model_deployments(options, {})
    assert needed(only.settings) == (cpus, gpus)


def test_a_configuration_that_cannot_be_read_names_its_model(models: Path) -> None:
    (models / "identity" / "config.pbtxt").write_text("no such field")
    with pytest.raises(ValueError, match="model 'identity': "):
        model_deployments(read_options({"model_repository": str(models)}), {})
