"""What models need of Ray Serve, and the options of servers and deployments that follow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from host.ray.autoscaling import QUEUE_SECONDS, TARGET_QUEUE_SECONDS, choose_replicas
from host.ray.deployment_options import (
    POLICY,
    ROUTER,
    derive_options,
    read_options,
    read_requirements,
)
from tests.conftest import RepositoryBuilder

INPUTS = """
    input [ { name: "X", data_type: TYPE_FP32, dims: [ 1 ] } ]
    output [ { name: "Y", data_type: TYPE_FP32, dims: [ 1 ] } ]
"""


def test_arguments_are_the_flags_of_serve(repository: RepositoryBuilder) -> None:
    options = read_options(
        {
            "model_repository": [repository.path],
            "model_control_mode": "explicit",
            "load_model": ["a", "b"],
            "exit_timeout_secs": 7,
        }
    )
    assert options.load_model == ["a", "b"] and options.exit_timeout_secs == 7
    assert not (options.allow_grpc or options.allow_http or options.allow_metrics)
    assert read_options({"model_repository": repository.path, "allow_grpc": True}).allow_grpc


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"no_such_flag": 1}, "no-such-flag"),
        ({"allow_client_shm": True}, "shared memory belongs to one machine"),
        ({"cache_config": "local,size=1048576"}, "use a Redis server"),
        ({"frontend_processes": "2"}, "proxies of Ray Serve take their place"),
        ({"dev": True}, "need a terminal"),
    ],
)
def test_what_cannot_work_in_several_replicas_is_refused_with_a_reason(
    repository: RepositoryBuilder, arguments: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        read_options({"model_repository": repository.path, **arguments})


def test_options_of_the_deployment_follow_from_the_models(repository: RepositoryBuilder) -> None:
    repository.add("plain", "", f'backend: "python" {INPUTS}')
    repository.add(
        "batched",
        "",
        f"""backend: "python" max_batch_size: 16 {INPUTS}
        instance_group [ {{ kind: KIND_CPU, count: 3 }} ]""",
    )
    repository.add("broken", "", "max_batch_size: [")
    options = read_options({"model_repository": repository.path})
    found = read_requirements(options)
    assert found.ongoing_requests == 2 * 3 * 16 + 2
    assert list(found.unreadable) == ["broken"] and found.gpus == 0
    derived = derive_options(options, found, {"num_replicas": 2})
    assert derived["max_ongoing_requests"] == 98 and derived["num_replicas"] == 2
    assert "request_router_config" not in derived

    repository.add(
        "sequences",
        "",
        f"""backend: "python" max_batch_size: 1 {INPUTS} sequence_batching {{ }}
        instance_group [ {{ kind: KIND_GPU, gpus: [ 0, 1 ] }} ]""",
    )
    found = read_requirements(options)
    derived = derive_options(options, found, {"autoscaling_config": {"max_replicas": 4}})
    assert found.gpus == 2 and derived["ray_actor_options"]["num_gpus"] == 2
    assert derived["request_router_config"] == ROUTER
    assert derived["autoscaling_config"] == {"policy": POLICY, "max_replicas": 4}


def test_a_group_on_gpus_counts_on_a_machine_without_any(repository: RepositoryBuilder) -> None:
    repository.add(
        "model",
        "",
        f"""backend: "python" max_batch_size: 64 {INPUTS}
        instance_group [ {{ kind: KIND_GPU, count: 2 }} ]""",
    )
    found = read_requirements(read_options({"model_repository": repository.path}))
    assert found.ongoing_requests == 2 * 2 * 64 and found.gpus == 1


@pytest.mark.parametrize(
    ("requests", "seconds", "wanted"),
    [
        (0, 0.0, 0),
        (6, 0.0, 3),
        (0, TARGET_QUEUE_SECONDS * 0.75, 4),
        (0, TARGET_QUEUE_SECONDS * 1.5, 6),
        (0, TARGET_QUEUE_SECONDS * 100, 8),
        (40, TARGET_QUEUE_SECONDS * 1.5, 20),
    ],
)
def test_requests_and_queues_ask_for_replicas(
    requests: float, seconds: float, wanted: float
) -> None:
    context = SimpleNamespace(
        current_num_replicas=4,
        total_num_requests=requests,
        config=SimpleNamespace(target_ongoing_requests=2),
        aggregated_metrics={QUEUE_SECONDS: {"one": seconds, "other": seconds}},
    )
    assert choose_replicas(context)[0] == pytest.approx(wanted)


def test_a_repository_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_options({"model_repository": tmp_path / "missing"})
