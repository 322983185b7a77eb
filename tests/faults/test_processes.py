"""Processes of the host that are killed or stand still, and limits of descriptors."""

from __future__ import annotations

import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from tests.clients import tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.faults.campaign import REPEATS, fault
from tests.faults.models import add_models
from tests.faults.witness import Witness

HELPERS = ("pbhost-fork-server", "process_reaper.py")


@pytest.fixture
def host(repository: RepositoryBuilder, serve: Serve) -> Iterator[RunningHost]:
    """A host that ends within its limit, whatever was done to its processes."""
    add_models(repository)
    yield serve(repository).wait_started()


def find(host: RunningHost, title: str) -> psutil.Process | None:
    """A live process of the host by a part of its command line."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(host.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if title in " ".join(child.cmdline()):
                    return child
    return None


def serves(host: RunningHost, model: str) -> bool:
    """Whether a model returns its input."""
    with host.client() as client, suppress(InferenceServerException):
        client.infer(model, [tensor("INPUT0", np.ones(1, np.float32))], client_timeout=10)
        return True
    return False


def kill_stub(host: RunningHost, instance: str) -> bool:
    """Kills the process of an instance; whether there was one."""
    for stub in host.stubs(instance):
        with suppress(psutil.NoSuchProcess):
            stub.kill()
            return True
    return False


def test_a_killed_stub_harms_no_other(host: RunningHost) -> None:
    with fault("a stub is killed", host):
        for _ in range(REPEATS):
            (stub,) = host.stubs("identity_0")
            stub.kill()
            wait_until(
                lambda: bool(host.stubs("identity_0")) and serves(host, "identity"),
                "another process",
            )


@pytest.mark.parametrize("title", HELPERS)
def test_a_killed_helper_process_harms_no_model(host: RunningHost, title: str) -> None:
    """The models are served, then or after the start of new processes."""
    helper = find(host, title)
    assert helper is not None
    helper.kill()
    wait_until(lambda: serves(host, "identity"), "the model to be served")
    # A stub that has just served may be one that ends with the helper process.
    wait_until(lambda: kill_stub(host, "identity_0"), "a process of the model")
    wait_until(lambda: serves(host, "identity"), "another process of the model")
    assert host.stop() == 0


@pytest.mark.parametrize("title", HELPERS)
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_helper_process_that_stands_still_harms_no_model(
    host: RunningHost, title: str, goes_on: bool
) -> None:
    """Requests continue, a stub that dies is replaced, readiness is true, and the exit is in time.

    If the helper continues, no stub results from the launch that it has not answered in time.
    """
    helper = find(host, title)
    assert helper is not None
    with Witness(host) as witness, host.client() as client:
        helper.send_signal(signal.SIGSTOP)
        (stub,) = host.stubs("identity_0")
        stub.kill()
        wait_until(
            lambda: stub not in host.stubs("identity_0") and serves(host, "identity"),
            "another stub",
        )
        assert client.is_model_ready("identity")
        if goes_on:
            helper.send_signal(signal.SIGCONT)
            wait_until(
                lambda: len(host.stubs("identity_0")) == 1 and helper.status() != "stopped",
                "one stub",
            )
        assert not witness.testify().errors
    assert host.stop() == 0
    assert "Exit timeout expired" not in host.output


def test_too_many_connections_harm_no_connection(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """The host has no descriptor left for the last of them; it accepts again when some close."""
    add_models(repository)
    host = serve(repository).wait_started()
    resource.prlimit(host.process.pid, resource.RLIMIT_NOFILE, (256, 256))
    with fault("descriptors run out", host):
        for _ in range(REPEATS):
            with ExitStack() as stack:
                for _ in range(400):
                    connection = socket.create_connection(("127.0.0.1", host.port), DEADLINE)
                    stack.enter_context(closing(connection))
            wait_until(lambda: serves(host, "identity"), "a new connection to be accepted")
