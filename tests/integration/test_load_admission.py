"""Limits on the instances that initialise at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clients import run_command
from tests.conftest import RepositoryBuilder, Serve, wait_until
from tests.integration.control_models import CONFIG, MODEL, model
from tests.integration.on_demand_models import parameter

FOUR = "instance_group [ { count: 4 } ]\n"


def counting(folder: Path) -> str:
    """A model whose `initialize` waits until the files of the folder allow one more to end.

    It writes how many others were in `initialize` at the same time.
    """
    body = f"""
        import fcntl
        with open({str(folder / "lock")!r}, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            open({str(folder)!r} + f"/in-{{os.getpid()}}", "w").close()
            inside = [name for name in os.listdir({str(folder)!r}) if name.startswith("in-")]
            with open({str(folder / "most")!r}, "a") as most:
                most.write(f"{{len(inside)}}\\n")
        print("initialises", flush=True)
        until(lambda: os.path.exists({str(folder / "gate")!r}), "the gate")
        os.remove({str(folder)!r} + f"/in-{{os.getpid()}}")
"""
    return MODEL.replace("\n        self.args = args\n", body)


def most_inside(folder: Path) -> int:
    """The largest number of instances that were in `initialize` at the same time."""
    return max(map(int, (folder / "most").read_text().split()))


@pytest.mark.parametrize(
    ("flags", "config", "most"),
    [
        ((), "", 8),
        (("--max-initializing-instances=3",), "", 3),
        ((), parameter("MAX_INITIALIZING_INSTANCES", 2), 4),
        (("--max-initializing-instances=3",), parameter("MAX_INITIALIZING_INSTANCES", 1), 2),
    ],
    ids=["no limit", "of all models", "of each model", "of both"],
)
def test_instances_wait_until_others_have_initialised(
    repository: RepositoryBuilder,
    serve: Serve,
    tmp_path: Path,
    flags: tuple[str, ...],
    config: str,
    most: int,
) -> None:
    for name in ("a", "b"):
        repository.add(name, counting(tmp_path), CONFIG + FOUR + config)
    host = serve(repository, *flags)
    wait_until(
        lambda: host.output.count("initialises") == most,
        f"{most} instances to initialise",
        state=lambda: host.output,
    )
    (tmp_path / "gate").touch()
    host.wait_started()
    assert host.output.count("initialises") == 8
    assert most_inside(tmp_path) == most


def test_an_instance_that_loads_a_model_lends_its_slot(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    loads = MODEL.replace(
        "\n        self.args = args\n", "\n        pb_utils.load_model('inner')\n"
    ).replace("NAME", "outer")
    repository.add("outer", loads, CONFIG)
    repository.add("inner", model("inner"), CONFIG)
    host = serve(
        repository, "--model-control-mode=explicit", "--max-initializing-instances=1"
    ).wait_started()
    with host.client() as client, ThreadPoolExecutor(1) as pool:
        pool.submit(client.load_model, "outer").result(60)
        assert run_command(client, "name", "inner") == "inner"
        assert run_command(client, "name", "outer") == "outer"
