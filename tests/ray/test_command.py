"""`pbhost ray`, the files that it writes, and `serve run` with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, wait_until
from tests.ray.conftest import GRPC, RayCluster, model_is_ready

pytest.importorskip("ray", reason="ray is not installed: make test-ray")
yaml = pytest.importorskip("yaml")

MODELS = ROOT / "model_repository"


def pbhost(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pbhost", "ray", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=ROOT,
    )


def checked(text: str) -> dict[str, Any]:
    """What a file of Ray Serve says, after Ray's own check."""
    from ray.serve.schema import ServeDeploySchema

    contents: dict[str, Any] = yaml.safe_load(text)
    ServeDeploySchema.model_validate(contents)
    return contents


def test_config_writes_what_ray_accepts() -> None:
    done = pbhost(
        "config",
        str(MODELS),
        "--max-replicas=4",
        "--grpc-port=9001",
        "--argument",
        "model_control_mode=explicit",
        "--argument",
        "load_model=add_sub",
        "--argument",
        "load_model=repeat",
    )
    assert done.returncode == 0, done.stderr
    config = checked(done.stdout)
    assert config["grpc_options"]["port"] == 9001
    (application,) = config["applications"]
    assert application["args"]["load_model"] == ["add_sub", "repeat"]
    (deployment,) = application["deployments"]
    assert deployment["autoscaling_config"]["max_replicas"] == 4
    assert deployment["max_ongoing_requests"] >= 32


def test_check_says_what_the_models_need(repository: RepositoryBuilder) -> None:
    done = pbhost("check", str(MODELS))
    assert done.returncode == 0, done.stderr
    assert "stateful_accumulator: sequences keep to one replica" in done.stdout
    assert "a replica needs 0 GPUs and takes" in done.stdout
    done = pbhost("check", str(MODELS), "--per-model=true")
    assert done.returncode == 0, done.stderr
    line = "add_sub: a replica needs 0 GPUs and 0.2 CPUs, and takes 32 concurrent requests"
    assert line in done.stdout.splitlines()
    repository.add("on_gpus", "", "instance_group [{kind: KIND_GPU, gpus: [0, 1]}]")
    done = pbhost("check", str(repository.path), "--per-model=true")
    assert done.stdout.startswith("on_gpus: 2 replicas; a replica needs 1 GPUs and 0.1 CPUs, and")
    done = pbhost("config", str(repository.path), "--per-model=true")
    (application,) = checked(done.stdout)["applications"]
    assert application["deployments"][1]["num_replicas"] == 2
    refused = pbhost("check", str(MODELS), "--argument", "cache_config=local,size=1048576")
    assert refused.returncode == 1 and "use a Redis server" in refused.stderr
    assert pbhost("serve", str(MODELS)).returncode == 2


def add() -> list[list[float]]:
    with grpcclient.InferenceServerClient(GRPC) as client:
        given = []
        for name in ("INPUT0", "INPUT1"):
            one = grpcclient.InferInput(name, [1, 4], "FP32")
            given.append(one.set_data_from_numpy(np.ones((1, 4), dtype=np.float32)))
        sums: list[list[float]] = client.infer("add_sub", given).as_numpy("SUM").tolist()
        return sums


def test_the_example_file_serves_a_model(cluster: RayCluster, tmp_path: Path) -> None:
    from ray import serve

    text = (ROOT / "deploy" / "ray" / "serve.yaml").read_text()
    checked(text)
    file = tmp_path / "serve.yaml"
    file.write_text(text.replace("/models", str(MODELS)).replace("8001", GRPC.split(":")[1]))
    done = subprocess.run(
        [str(Path(sys.executable).with_name("serve")), "run", "--non-blocking", str(file)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
    )
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: model_is_ready("add_sub"), "the model of user_config")
        assert add() == [[2.0] * 4]
    finally:
        serve.delete("pbhost")


def test_run_serves_until_it_is_interrupted(cluster: RayCluster) -> None:
    from ray import serve

    arguments = ["--argument=model_control_mode=explicit", "--argument=load_model=add_sub"]
    in_the_background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]  # as scripts start it
    process = subprocess.Popen(
        [*in_the_background, sys.executable, "-m", "pbhost", "ray", "run", str(MODELS), *arguments],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        cwd=ROOT,
    )
    try:
        wait_until(lambda: model_is_ready("add_sub"), "the model")
        assert add() == [[2.0] * 4]
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 0
        assert "pbhost" not in serve.status().applications
    finally:
        process.kill()
        process.wait()
