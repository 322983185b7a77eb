"""The options of deployments, from the configurations of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from host.ray.deployment_options import read_options
from host.ray.model_deployments import ingress_settings, model_deployments
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
    policy = {"policy_function": "pbhost.host.ray.autoscaling:choose_replicas"}
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


def settings_of(models: Path, groups: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a model with these instance groups."""
    text = f"max_batch_size: 64 instance_group [{groups}]"
    (models / "on_gpu" / "config.pbtxt").write_text(text)
    options = read_options({"model_repository": str(models), **EXPLICIT, "load_model": "on_gpu"})
    (only,) = model_deployments(options, {"on_gpu": given})
    return only.settings


@pytest.mark.parametrize(
    ("groups", "replicas", "gpus", "cpus"),
    [
        ("{kind: KIND_GPU gpus: [0, 1]}", 2, 1, 0.1),
        ("{kind: KIND_GPU count: 2 gpus: [1, 3, 5]}", 3, 1, 0.2),
        ("{kind: KIND_GPU gpus: [0]}, {kind: KIND_GPU gpus: [1]}", 2, 1, 0.1),
        ("{gpus: [0, 1] count: 3}, {gpus: [1, 0] passive: true}", 2, 1, 0.4),
        ("{gpus: [2]}", 1, 1, 0.1),
        ("{kind: KIND_GPU gpus: [0, 0, 1, 1]}", 2, 1, 0.2),
    ],
)
def test_each_replica_holds_the_groups_of_one_gpu(
    models: Path, groups: str, replicas: int, gpus: int, cpus: float
) -> None:
    settings = settings_of(models, groups, {})
    assert settings["num_replicas"] == replicas
    assert needed(settings) == (cpus, gpus)
    instances = round(cpus * 10)
    assert settings["max_ongoing_requests"] == 2 * 64 * instances  # of one replica


@pytest.mark.parametrize(
    ("groups", "gpus", "cpus"),
    [
        ("{kind: KIND_GPU count: 2 gpus: [1]}, {kind: KIND_CPU}", 2, 0.3),
        ("{kind: KIND_GPU count: 2}, {kind: KIND_GPU gpus: [0, 1, 2]}", 3, 0.5),
        ("{kind: KIND_GPU gpus: [0]}, {kind: KIND_GPU gpus: [1] count: 2}", 2, 0.3),
        ("{kind: KIND_GPU gpus: [0, 0, 1]}", 2, 0.3),
        ("{kind: KIND_MODEL}", 0, 0.1),
        ("{kind: KIND_CPU count: 2}", 0, 0.2),
    ],
)
def test_groups_that_differ_between_gpus_share_a_replica(
    models: Path, groups: str, gpus: int, cpus: float
) -> None:
    settings = settings_of(models, groups, {})
    assert "num_replicas" not in settings
    assert needed(settings) == (cpus, gpus)


def test_given_replicas_hold_one_gpu_each_unless_they_are_given_more(models: Path) -> None:
    groups = "{kind: KIND_GPU gpus: [0, 1]}"
    assert settings_of(models, groups, {"num_replicas": 5})["num_replicas"] == 5
    scaled = settings_of(models, groups, {"autoscaling_config": {"max_replicas": 4}})
    assert "num_replicas" not in scaled and needed(scaled) == (0.1, 1)
    both = settings_of(models, groups, {"ray_actor_options": {"num_cpus": 1, "num_gpus": 2}})
    assert "num_replicas" not in both and both["max_ongoing_requests"] == 2 * 64 * 2
    half = settings_of(models, groups, {"ray_actor_options": {"num_cpus": 1, "num_gpus": 0.5}})
    assert half["num_replicas"] == 2 and half["max_ongoing_requests"] == 2 * 64


@pytest.mark.parametrize("given", [{"num_gpus": 0}, {"num_gpus": None}, {"num_cpus": 1}])
def test_replicas_that_are_given_no_gpu_have_all_groups(
    models: Path, given: dict[str, Any]
) -> None:
    groups = "{kind: KIND_GPU gpus: [0, 1]}"
    settings = settings_of(models, groups, {"ray_actor_options": given})
    assert "num_replicas" not in settings
    assert settings["max_ongoing_requests"] == 2 * 64 * 2


def test_a_group_with_a_wrong_gpu_is_not_divided(models: Path) -> None:
    assert "num_replicas" not in settings_of(models, "{kind: KIND_GPU gpus: [-1, 0]}", {})


def test_a_configuration_that_cannot_be_read_names_its_model(models: Path) -> None:
    (models / "identity" / "config.pbtxt").write_text("no such field")
    with pytest.raises(ValueError, match="model 'identity': "):
        model_deployments(read_options({"model_repository": str(models)}), {})
