"""The memory budget: which models are unloaded to make room, and which loads are refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clients import infer_error, run_command, send_command
from tests.conftest import (
    DEADLINE,
    NEW_INTERPRETER,
    RepositoryBuilder,
    RunningHost,
    Serve,
    wait_until,
)
from tests.integration.control_models import CONFIG, index
from tests.integration.memory_budget_models import (
    MIB,
    budget,
    evictions,
    large,
    memory,
    pipeline,
)
from tests.integration.on_demand_models import ON_DEMAND, metric, parameter, waiting

UNLOADED = [("1", "UNAVAILABLE", "unloaded")]
READY = [("1", "READY", "")]
NAMES = ["a", "b", "c", "d", "pinned", "sequence", "two", "three"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, module_serve: Serve) -> RunningHost:
    """A host with a budget in which two of its models fit."""
    repository = RepositoryBuilder(tmp_path_factory.mktemp("budget"))
    for name in "abcd":
        repository.add(name, large(name), CONFIG)
    repository.add("pinned", large("pinned"), CONFIG + parameter("PINNED", "yes"))
    repository.add("sequence", large("sequence"), CONFIG + "sequence_batching {}")
    repository.add("stated", large("stated"), CONFIG + parameter("MEMORY_BYTES", 80 * MIB))
    repository.add("huge", large("huge", 150), CONFIG)
    repository.add("two", config=pipeline("a", "b"))
    repository.add("three", config=pipeline("a", "b", "c"))
    host = module_serve(repository, ON_DEMAND, budget(2), program=NEW_INTERPRETER)
    return host.wait_started()


@pytest.fixture
def host(running: RunningHost) -> Iterator[RunningHost]:
    """The host without loaded models."""
    yield running
    with running.client() as client:
        for name in NAMES:
            client.unload_model(name)
        wait_until(lambda: not _stubs(running), "the models to unload")


def _stubs(host: RunningHost) -> list[str]:
    return [name for name in NAMES if metric(host, "pbhost_stub_up", model=name)]


def ask(host: RunningHost, text: str, name: str) -> str:
    with host.client() as client:
        return run_command(client, text, name)


def error_of(host: RunningHost, name: str) -> str:
    with host.client() as client:
        return infer_error(run_command, client, "name", name)[1]


def loaded(host: RunningHost) -> list[str]:
    with host.client() as client:
        return [name for name in NAMES if client.is_model_ready(name)]


# Which models are unloaded


def test_the_least_recently_used_model_makes_room(host: RunningHost) -> None:
    before = [evictions(host, name) for name in "abc"]
    for name in "abac":
        assert ask(host, "name", name) == name
    with host.client() as client:
        wait_until(lambda: index(client, "b") == UNLOADED, "the model to unload")
        assert index(client, "a") == index(client, "c") == READY
        assert client.is_server_ready()
    assert [evictions(host, name) for name in "abc"] == [before[0], before[1] + 1, before[2]]
    host.wait_for("unloading 'b' to make room in the memory budget")
    ask(host, "name", "d")
    for name in "bacbd":  # what each needs is known by now, so that room is made before the load
        assert ask(host, "name", name) == name
        assert memory(host) <= metric(host, "pbhost_memory_budget_bytes", device="host")
    assert loaded(host) == ["b", "d"]


def test_pinned_models_stay(host: RunningHost) -> None:
    for name in ["pinned", *"abab"]:
        assert ask(host, "name", name) == name
    assert "pinned" in loaded(host)
    assert evictions(host, "pinned") == 0


def test_a_model_in_use_stays_and_the_load_waits(host: RunningHost, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    for name in "cab":  # what `c` needs is known
        ask(host, "name", name)
    with ThreadPoolExecutor(3) as pool:
        working = [pool.submit(ask, host, f"wait {gate}", name) for name in "ab"]
        host.wait_for(f"(?s)waiting for {gate}.*waiting for {gate}")
        late = pool.submit(ask, host, "name", "c")
        wait_until(lambda: waiting(host) == 1, "the request to wait", state=lambda: host.output)
        assert loaded(host) == ["a", "b"]
        gate.touch()
        assert [one.result(DEADLINE) for one in working] == ["waited"] * 2
        assert late.result(DEADLINE) == "c"


def test_models_whose_processes_die_make_room(host: RunningHost) -> None:
    for pid in [int(ask(host, "pid", name)) for name in "ab"]:
        os.kill(pid, signal.SIGKILL)
    for name in "cdab":
        assert ask(host, "name", name) == name


def test_a_process_that_dies_while_its_model_is_unloaded_makes_room(
    host: RunningHost, tmp_path: Path
) -> None:
    pid = int(ask(host, "pid", "a"))
    assert ask(host, f"hold {tmp_path / 'gate'}", "a") == "holds"
    assert ask(host, "name", "b") == "b"
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(ask, host, "name", "c")
        host.wait_for("a finalizes")
        assert not late.done()
        os.kill(pid, signal.SIGKILL)
        assert late.result(DEADLINE) == "c"
    assert loaded(host) == ["b", "c"]
    assert ask(host, "name", "a") == "a"


def test_a_model_that_grows_makes_others_leave(host: RunningHost) -> None:
    for name in "ba":
        ask(host, "name", name)
    assert ask(host, "grow 50", "a") == "grown"
    wait_until(lambda: loaded(host) == ["a"], "the other model to leave", state=lambda: host.output)


def test_an_open_sequence_keeps_its_model(host: RunningHost) -> None:
    for name in "ab":
        ask(host, "name", name)
    with host.client() as client:
        run_command(client, "name", "pinned")
        run_command(client, "name", "sequence", sequence_id=7, sequence_start=True)
        call = send_command(client, "name", "a")
        wait_until(lambda: waiting(host) == 1, "the request to wait", state=lambda: host.output)
        assert loaded(host) == ["pinned", "sequence"]
        run_command(client, "name", "sequence", sequence_id=7, sequence_end=True)
        wait_until(lambda: loaded(host) == ["a", "pinned"], "the model to load")
        call.cancel()


# Which loads are refused


def test_a_model_that_states_too_much_is_refused_with_the_sum(host: RunningHost) -> None:
    ask(host, "name", "pinned")
    text = error_of(host, "stated")
    assert text.startswith(
        "failed to load 'stated': model 'stated' does not fit into the memory budget: host: it"
        " needs 80.0 MiB, and 'pinned' uses "
    )
    assert text.endswith("MiB (pinned); the budget is 110.0 MiB")
    with host.client() as client:
        assert client.is_server_ready()
        ((_, state, reason),) = index(client, "stated")
    assert state == "UNAVAILABLE" and "does not fit into the memory budget" in reason
    assert "loading: stated:1" not in host.output
    assert ask(host, "name", "c") == "c"


def test_a_model_that_turns_out_too_large_is_refused(host: RunningHost) -> None:
    refusal = "model 'huge' does not fit into the memory budget: host: it needs 1"
    ask(host, "name", "a")
    for _ in range(2):
        assert refusal in error_of(host, "huge")
    assert host.output.count("loading: huge:1") == 1  # by then its need is known
    with host.client() as client:
        assert refusal in infer_error(client.load_model, "huge")[1]


def test_without_loading_on_demand_nothing_makes_room(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    for name in "ab":
        repository.add(name, large(name), CONFIG)
    flags = ("--model-control-mode=explicit", budget(1))
    host = serve(repository, *flags, program=NEW_INTERPRETER).wait_started()
    with host.client() as client:
        client.load_model("a")
        text = infer_error(client.load_model, "b")[1]
        assert "'b' does not fit into the memory budget" in text
        assert "(does not load on demand)" in text
        client.unload_model("a")
        client.load_model("b")


# Models that need others


def test_models_that_need_each_other(host: RunningHost) -> None:
    text = ask(host, "ask b ask c name", "a")
    assert text.startswith("Model c - Error when running inference: failed to load 'c':")
    assert "(needs 'c', or is needed with it)" in text
    assert ask(host, "ask b name", "a") == "b"
    assert ask(host, "ask a name", "b") == "a"


def test_loads_that_wait_for_each_other_do_not_hang(host: RunningHost, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    for name in "cdab":
        ask(host, "name", name)
    with ThreadPoolExecutor(2) as pool:
        asking = [
            pool.submit(ask, host, f"wait_and_ask {gate} {other} name", name)
            for other, name in {"c": "a", "d": "b"}.items()
        ]
        host.wait_for(f"(?s)waiting for {gate}.*waiting for {gate}")
        gate.touch()
        answers = [one.result(DEADLINE) for one in asking]
    refused = [answer for answer in answers if "does not fit into the memory budget" in answer]
    assert len(refused) == 1 and len({"c", "d"}.intersection(answers)) == 1, answers


def test_an_ensemble_makes_room_for_all_its_models(host: RunningHost) -> None:
    for name in "cd":
        ask(host, "name", name)
    assert ask(host, "hello you", "two") == "hello you a b"
    assert loaded(host) == ["a", "b", "two"]
    assert ask(host, "name", "c") == "c"
    assert "two" not in loaded(host)
    assert ask(host, "hello you", "two") == "hello you a b"
    assert "does not fit into the memory budget" in error_of(host, "three")
    assert ask(host, "name", "d") == "d"


# GPUs


def test_memory_of_gpus_has_its_own_budget(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    """The driver's program prints what models have written that they use."""
    used, program = tmp_path / "used", tmp_path / "bin" / "nvidia-smi"
    used.mkdir()
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\ncase "$1" in *gpu=*) echo "0, GPU-1";; *) cat /dev/null {used}/*; esac\n'
    )
    program.chmod(0o755)
    for name in "abc":
        uses = f'open(f"{used}/{{os.getpid()}}", "w").write(f"{{os.getpid()}}, GPU-1, 400\\n")'
        text = large(name, 1).replace("self.args = args", f"self.args = args; {uses}")
        repository.add(name, text, CONFIG)
    host = serve(
        repository,
        ON_DEMAND,
        f"--memory-budget=0:{1000 * MIB}",
        env={"PATH": f"{program.parent}:{os.environ['PATH']}"},
    ).wait_started()
    for name in "abc":
        assert ask(host, "name", name) == name
    assert evictions(host, "a") == 1
    assert metric(host, "pbhost_model_memory_bytes", model="c", device="gpu0") == 400 * MIB
