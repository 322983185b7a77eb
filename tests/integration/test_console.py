"""Hosts whose standard streams are gone, or whose limits are too low: they stop, and say why."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder, Serve, wait_until

_PORTS = ["--grpc-port=0", "--grpc-address=127.0.0.1", "--allow-http=false"]
_TENSORS = """
    input { name: "x" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "y" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def command(repository: RepositoryBuilder, *more: str) -> list[str]:
    flags = [f"--model-repository={repository.path}", *_PORTS, "--allow-metrics=false", *more]
    return [sys.executable, "-m", "pbhost", "serve", *flags]


def test_a_signal_ends_a_host_whose_log_is_no_longer_read(
    repository: RepositoryBuilder,
) -> None:
    repository.copy("identity")
    host = subprocess.Popen(
        command(repository), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with host:
        assert host.stdout is not None and host.stderr is not None
        assert any("Started GRPCInferenceService" in line for line in host.stdout)
        host.stdout.close()
        host.send_signal(signal.SIGTERM)
        try:
            said = host.stderr.read()
            assert host.wait(DEADLINE) == 0
        finally:
            host.kill()
    assert said == "warning: the log cannot be written to the console: Broken pipe\n"


def test_a_host_without_standard_streams_serves_and_ends(
    repository: RepositoryBuilder, tmp_path: Path
) -> None:
    repository.copy("identity")
    log = tmp_path / "log"
    words = command(repository, f"--log-file={log}")
    host = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words])
    with host:
        try:
            wait_until(lambda: log.exists() and "Started GRPC" in log.read_text(), "a host")
            console = {os.readlink(f"/proc/{host.pid}/fd/{number}") for number in range(3)}
            assert console == {os.devnull}, "no other file is taken for the console"
            host.send_signal(signal.SIGTERM)
            assert host.wait(DEADLINE) == 0
        finally:
            host.kill()


@pytest.mark.unmeasured
def test_a_limit_that_is_too_low_is_the_reason_of_a_failed_start(
    repository: RepositoryBuilder,
) -> None:
    repository.copy("identity")
    done = subprocess.run(
        command(repository),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 1
    assert done.stderr == "error: creating server: Internal - [Errno 27] File too large\n"


def test_models_without_standard_output_are_finalized_like_others(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    for name, deed in [("closes", "sys.stdout.close()"), ("drops", "sys.stdout = None")]:
        model = f"""
            import sys

            class TritonPythonModel:
                def initialize(self, args):
                    {deed}

                def finalize(self):
                    raise ValueError("{name}, and is heard")
        """
        repository.add(name, model, 'backend: "python"' + _TENSORS)
    running = serve(repository).wait_started()
    assert running.stop() == 0
    for name in ("closes", "drops"):
        assert f"{name}, and is heard" in running.output
    assert "Traceback" not in running.output


def test_address_space_that_is_too_small_for_tensors_is_told_with_what_helps(
    repository: RepositoryBuilder,
) -> None:
    repository.copy("identity")
    for size, reason in [
        ("", r"no address space for \d+ bytes of tensors: Cannot allocate memory; set"),
        ("--arena-byte-size=250000000", r"cannot start a stub process for 'identity:1': Cannot"),
    ]:
        done = subprocess.run(
            command(repository, *filter(None, [size])),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1500 << 20, 1500 << 20)),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert done.returncode == 1
        assert re.search(reason, done.stderr), done.stderr
        assert "--arena-byte-size to less" in done.stderr
        assert "Traceback" not in done.stderr
