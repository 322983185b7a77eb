"""Models in existing Python environments: folders and archives, of this Python and of others."""

from __future__ import annotations

import json
import os
import signal
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest

import pbhost
from tests.clients import (
    Client,
    InferStream,
    infer_error,
    infer_through,
    run_command,
    run_script,
    tensor,
)
from tests.conftest import ROOT, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.test_inprocess import options
from tests.pythons import (
    EVALUATES,
    config,
    empty_venv,
    full_venv,
    interpreter,
    own_venv,
    pack,
    site_packages,
    touch,
)

EXPLICIT = "--model-control-mode=explicit"


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of this interpreter."""
    return own_venv(tmp_path_factory.mktemp("own") / "env")


@pytest.fixture(scope="module")
def packed(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same environment as an archive."""
    return pack(venv, tmp_path_factory.mktemp("packed") / "env.tar.gz")


def says(client: Client, expression: str, model: str = "m") -> str:
    return run_command(client, expression, model)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_model_runs_in_a_folders_environment(
    repository: RepositoryBuilder, serve: Serve, venv: Path, start: str
) -> None:
    repository.add("m", EVALUATES, config(EXECUTION_ENV_PATH=str(venv)))
    repository.add("plain", EVALUATES)
    host = serve(
        repository,
        "--log-verbose=1",
        f"--stub-start={start}",
        env={"PYTHONHOME": "", "LD_LIBRARY_PATH": "/opt/libraries", "PYTHONSAFEPATH": "1"},
    ).wait_started()
    with host.client() as client:
        assert says(client, "sys.prefix") == str(venv)
        assert says(client, "sys.prefix", "plain") != str(venv)
        assert says(client, "sys.argv") == "['']"
        path = json.loads(says(client, "json.dumps(sys.path)"))
        assert path[0] == ""
        assert os.getcwd() not in path[1:], "only what a stub is made of is lent"
        told = json.loads(says(client, "json.dumps(dict(os.environ))"))
    assert told["VIRTUAL_ENV"] == str(venv)
    assert told["VIRTUAL_ENV_PROMPT"] == f"({venv})"
    assert told["PATH"] == f"{venv}/bin:{os.environ['PATH']}"
    assert told["LD_LIBRARY_PATH"] == f"{venv}/lib:/opt/libraries"
    assert "PYTHONHOME" not in told
    host.wait_for(f"Using Python execution env {venv}")
    host.wait_for(
        "Returning canonical path since EXECUTION_ENV_PATH does not contain compressed path."
        f" Path: {venv}"
    )


def test_the_model_directory_keyword_is_replaced(
    repository: RepositoryBuilder, serve: Serve, venv: Path
) -> None:
    folder = repository.add(
        "m", EVALUATES, config(EXECUTION_ENV_PATH="/$$TRITON_MODEL_DIRECTORY/e")
    )
    (folder / "e").symlink_to(venv)
    host = serve(repository).wait_started()
    host.wait_for(f"Using Python execution env /{folder}/e")
    with host.client() as client:
        assert says(client, "sys.prefix") == str(venv), "the canonical path"


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_restarted_stub_keeps_its_environment(
    repository: RepositoryBuilder, serve: Serve, packed: Path, start: str
) -> None:
    repository.add(
        "m", EVALUATES, config(EXECUTION_ENV_PATH=str(packed)) + "instance_group [ { count: 3 } ]"
    )
    host = serve(repository, f"--stub-start={start}").wait_started()
    with host.client() as client:
        before = says(client, "sys.prefix")
        stubs = {stub.pid for stub in host.stubs("m_0_0")}
        assert len(stubs) == 1
        os.kill(stubs.pop(), signal.SIGKILL)
        host.wait_for(r"\[m:1/m_0_0\] restarted")
        prefixes = {says(client, "sys.prefix") for _ in range(12)}
        assert prefixes == {before}


def test_an_archive_is_unpacked_once_for_all_models_and_removed_at_exit(
    repository: RepositoryBuilder, serve: Serve, packed: Path
) -> None:
    for name in ("m", "n", "o"):
        repository.add(name, EVALUATES, config(EXECUTION_ENV_PATH=str(packed)))
    host = serve(repository, "--log-verbose=1").wait_started()
    with host.client() as client:
        prefix = Path(says(client, "sys.prefix"))
        assert {says(client, "sys.prefix", name) for name in ("n", "o")} == {str(prefix)}
    assert host.output.count(f"Extracting Python execution env {packed}") == 1
    private = prefix.parents[1]
    assert private.parent == Path(tempfile.gettempdir())
    assert private.stat().st_mode & 0o777 == 0o700
    assert host.stop() == 0
    assert not private.exists()


def test_an_archive_is_unpacked_again_when_it_has_changed_and_not_before(
    repository: RepositoryBuilder, serve: Serve, packed: Path
) -> None:
    folder = repository.add(
        "m", EVALUATES, config(EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    )
    archive = folder / "env.tar.gz"
    archive.write_bytes(packed.read_bytes())
    host = serve(repository, "--log-verbose=1", EXPLICIT, "--load-model=m").wait_started()
    extractions = f"Extracting Python execution env {archive}"
    with host.client() as client:
        first = Path(says(client, "sys.prefix"))
        touch(folder / "1" / "model.py", 10)
        client.load_model("m")
        assert says(client, "sys.prefix") == str(first)
        assert host.output.count(extractions) == 1
        touch(archive, 10)
        client.load_model("m")
        assert says(client, "sys.prefix") != str(first)
        assert host.output.count(extractions) == 2
        wait_until(lambda: not first.exists(), "the unused earlier copy to be removed")


CONDA_UNPACK = """\
#!/no/such/python
import sys
if {fails}:
    sys.exit("prefix not found")
with open(sys.prefix + "/unpacked-by", "w") as file:
    file.write(sys.executable)
"""


@pytest.fixture
def conda(packed: Path, tmp_path: Path) -> Path:
    """The archive with a working `conda-unpack`."""
    return _with_conda_unpack(packed, tmp_path / "conda.tar", fails=False)


def _with_conda_unpack(packed: Path, archive: Path, fails: bool) -> Path:
    script = archive.parent / "conda-unpack"
    script.write_text(CONDA_UNPACK.format(fails=fails))
    with tarfile.open(packed) as old, tarfile.open(archive, "w") as new:
        for member in old:
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
        new.add(script, "bin/conda-unpack")
    return archive


def test_conda_unpack_is_run_after_unpacking(
    repository: RepositoryBuilder, serve: Serve, conda: Path
) -> None:
    repository.add("m", EVALUATES, config(EXECUTION_ENV_PATH=str(conda)))
    host = serve(repository).wait_started()
    with host.client() as client:
        prefix = says(client, "sys.prefix")
        assert says(client, "open(sys.prefix + '/unpacked-by').read()") == f"{prefix}/bin/python"


def test_a_custom_stub_executable_is_not_used_and_gives_a_warning(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    folder = repository.add("m", EVALUATES)
    (folder / "triton_python_backend_stub").write_text("#!/bin/false\n")
    host = serve(repository).wait_started()
    host.wait_for(
        f"model 'm': {folder}/triton_python_backend_stub is not used. Custom stub executables"
        " are not supported; the model runs on the Python of EXECUTION_ENV_PATH or on the host's"
        " Python"
    )


class Refusals:
    """One host that loads invalid models one after the other."""

    def __init__(self, host: RunningHost, repository: RepositoryBuilder) -> None:
        self._host = host
        self._repository = repository
        self._count = 0

    def of(self, path: object, name: str = "EXECUTION_ENV_PATH", **more: str) -> str:
        """The reason why a model with this parameter does not load."""
        self._count += 1
        model = f"bad{self._count}"
        self.folder = self._repository.add(model, EVALUATES, config(**{name: str(path)}, **more))
        with self._host.client() as client:
            status, text = infer_error(client.load_model, model)
        assert status == "StatusCode.INVALID_ARGUMENT"
        start = f"load failed for model '{model}': version 1 is at UNAVAILABLE state: Internal: "
        assert text.startswith(start), text
        return text[len(start) :].removesuffix(";\n").removesuffix(";")


@pytest.fixture(scope="module")
def refusals(module_repository: RepositoryBuilder, module_serve: Serve) -> Refusals:
    host = module_serve(module_repository, EXPLICIT, "--log-verbose=1").wait_started()
    return Refusals(host, module_repository)


def test_a_missing_environment_is_named_in_the_error(refusals: Refusals) -> None:
    assert refusals.of("/no/env") == "Failed to get the canonical path for /no/env."


def test_a_relative_path_in_the_models_folder_gets_a_hint(refusals: Refusals, packed: Path) -> None:
    text = refusals.of("config.pbtxt")
    assert text == (
        "Failed to get the canonical path for config.pbtxt. It is in the model's directory: write"
        " $$TRITON_MODEL_DIRECTORY/config.pbtxt"
    )


def test_a_folder_that_is_not_an_environment_is_refused(refusals: Refusals, tmp_path: Path) -> None:
    assert refusals.of(tmp_path) == (
        f"Path {tmp_path}/bin/activate does not exist. The Python environment should contain an"
        " 'activate' script."
    )


def _members(archive: Path, *names: str) -> Path:
    with tarfile.open(archive, "w:gz") as file:
        for name in names:
            file.addfile(tarfile.TarInfo(name))
    return archive


@pytest.mark.parametrize(
    ("member", "reason"),
    [("../evil", "Path contains '..': ../evil"), ("/evil", "Path is absolute: /evil")],
)
def test_an_archive_that_writes_outside_its_folder_is_refused(
    refusals: Refusals, tmp_path: Path, member: str, reason: str
) -> None:
    archive = _members(tmp_path / "evil.tar.gz", "bin/activate", member)
    before = set(Path(tempfile.gettempdir()).glob("pbhost-*/python_env/*"))
    text = refusals.of(archive)
    assert text == f"Failed to extract the Python execution env {archive}: {reason}"
    assert set(Path(tempfile.gettempdir()).glob("pbhost-*/python_env/*")) == before


def test_a_placeholder_file_in_place_of_an_archive_is_refused(
    refusals: Refusals, tmp_path: Path
) -> None:
    archive = tmp_path / "env.tar.gz"
    archive.write_text("a placeholder of git-lfs")
    assert refusals.of(archive).startswith(
        f"Failed to extract the Python execution env {archive}: it is not a readable tar file: "
    )


def test_an_archive_without_an_environment_is_refused(refusals: Refusals, tmp_path: Path) -> None:
    text = refusals.of(_members(tmp_path / "other.tar.gz", "bin/python"))
    assert "/bin/activate does not exist. The Python environment should contain an" in text


def test_a_failing_conda_unpack_is_reported(
    refusals: Refusals, packed: Path, tmp_path: Path
) -> None:
    archive = _with_conda_unpack(packed, tmp_path / "bad.tar", fails=True)
    text = refusals.of(archive)
    assert text.startswith(f"Failed to extract the Python execution env {archive}: '")
    assert text.endswith("/bin/conda-unpack' ended with status 1; it printed:\nprefix not found")


def test_an_environment_without_an_interpreter_is_refused(
    refusals: Refusals, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    assert refusals.of(tmp_path) == (
        f"The Python environment {tmp_path} has no interpreter at bin/python."
    )


def test_an_interpreter_that_does_not_run_is_reported(refusals: Refusals, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    (tmp_path / "bin" / "activate").touch()
    python.write_text("#!/bin/sh\necho 'libpython3.9.so: cannot open shared object'; exit 127\n")
    python.chmod(0o755)
    assert refusals.of(tmp_path) == (
        f"The Python environment {tmp_path} does not work: '{python}' ended with status 127;"
        " it printed:\nlibpython3.9.so: cannot open shared object"
    )
    python.write_text("#!/bin/sh\necho hello\n")
    assert refusals.of(tmp_path) == (
        f"The Python environment {tmp_path} does not work: its Python printed no result;"
        " it printed:\nhello"
    )
    python.write_text("#!/no/interpreter\n")
    assert refusals.of(tmp_path) == (
        f"The Python environment {tmp_path} does not work: '{python}' cannot be run: No such file"
        " or directory"
    )


def test_missing_packages_are_reported_with_the_install_command(
    refusals: Refusals, tmp_path: Path
) -> None:
    env = empty_venv(tmp_path / "env")
    text = refusals.of(env)
    assert text.startswith(f"The Python environment {env} (CPython ")
    assert text.endswith(
        " lacks numpy, pyzmq, msgspec, which a model's process needs. Install the missing"
        f" packages: {env}/bin/python -m pip install numpy pyzmq msgspec"
    )
    archive = pack(env, tmp_path / "env.tar.gz")
    text = refusals.of(archive)
    assert text.endswith(f" Install before packing {archive}: pip install numpy pyzmq msgspec")


def test_an_environment_packed_for_triton_uses_the_servers_transport_packages(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    env = empty_venv(tmp_path / "env")
    for name in ("numpy", "numpy.libs"):
        (site_packages(env) / name).symlink_to(Path(np.__file__).parents[1] / name)
    archive = pack(env, tmp_path / "env.tar.gz")
    repository.add("folder", EVALUATES, config(EXECUTION_ENV_PATH=str(env)))
    repository.add("archive", EVALUATES, config(EXECUTION_ENV_PATH=str(archive)))
    host = serve(repository).wait_started()
    with host.client() as client:
        assert says(client, "sys.prefix", "folder") == str(env)
        for model in ("folder", "archive"):
            assert says(client, "np.__file__", model).startswith(says(client, "sys.prefix", model))
            path = json.loads(says(client, "json.dumps(sys.path)", model))
            assert set(os.listdir(path[-1])) == {
                "c_python_backend_utils", "msgspec", "pb_utils", "stub",
                "triton_python_backend_utils", "zmq",
            }, "other packages of the server are not lent"  # fmt: skip


def test_only_packages_that_an_environment_lacks_are_the_servers(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    env = empty_venv(tmp_path / "env")
    for name in ("numpy", "numpy.libs", "msgspec"):
        (site_packages(env) / name).symlink_to(site_packages(Path(sys.prefix)) / name)
    repository.add("m", EVALUATES, config(EXECUTION_ENV_PATH=str(env)))
    host = serve(repository).wait_started()
    with host.client() as client:
        assert says(client, "__import__('msgspec').__file__").startswith(str(env))
        assert not says(client, "__import__('zmq').__file__").startswith(str(env))


def test_a_package_that_cannot_be_imported_is_reported(refusals: Refusals, tmp_path: Path) -> None:
    env = own_venv(tmp_path / "env")
    (site_packages(env) / "msgspec.py").write_text("raise ImportError('undefined symbol: PyX')")
    assert refusals.of(env).endswith(
        " has a msgspec that cannot be imported: ImportError: undefined symbol: PyX"
    )


@pytest.mark.parametrize("version", ["2.7", "3.7"])
def test_a_python_version_that_is_too_old_is_reported(
    refusals: Refusals, tmp_path: Path, version: str
) -> None:
    python = interpreter(version)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    (tmp_path / "bin" / "python").symlink_to(python)
    text = refusals.of(tmp_path)
    assert text.startswith(f"The Python environment {tmp_path} has CPython {version}.")
    assert text.endswith(", but a model needs CPython 3.8 or later.")


@pytest.mark.parametrize(
    "body",
    ["import signal\nsignal.pause()", "import os, signal\nif os.fork():\n    signal.pause()"],
    ids=["alone", "with a child"],
)
def test_a_step_over_its_time_limit_is_killed(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path, packed: Path, body: str
) -> None:
    env = own_venv(tmp_path / "env")
    (site_packages(env) / "usercustomize.py").write_text("")
    (site_packages(env) / "sitecustomize.py").write_text(body)
    repository.add("m", EVALUATES, config(EXECUTION_ENV_PATH=str(env)))
    host = serve(repository, "--environment-timeout-secs=2", "--exit-on-error=false")
    host.wait_started()
    host.wait_for(
        f"The Python environment {env} does not work: '{env}/bin/python' was killed after 2 s,"
        " the limit of --environment-timeout-secs"
    )


def test_a_server_stop_ends_the_preparation_of_an_environment(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    env = own_venv(tmp_path / "env")
    begun = tmp_path / "begun"
    (site_packages(env) / "sitecustomize.py").write_text(
        f"import signal\nopen({str(begun)!r}, 'w').close()\nsignal.pause()"
    )
    repository.add("m", EVALUATES, config(EXECUTION_ENV_PATH=str(pack(env, tmp_path / "e.tar"))))
    host = serve(repository)
    wait_until(begun.exists, "the environment's Python to be looked at")
    assert host.stop() == 0


TEST_ALL = pytest.mark.test_all(reason="the oldest Python has the most differences")

AWAITS = """
    asked = ask("identity", tensor("INPUT0", np.arange(3, dtype=np.float32)), outputs=["OUTPUT0"])
    answer = await asked.async_exec()
    return pb_utils.get_output_tensor_by_name(answer, "OUTPUT0").as_numpy().tolist()
"""

STREAMS = """
    return numbers(ask("stream", command("respond respond final")).exec(decoupled=True))
"""

MEASURES = """
    family = pb_utils.MetricFamily(
        name="seen", description="d", kind=pb_utils.MetricFamily.COUNTER)
    metric = family.Metric(labels={"a": "b"})
    metric.increment(2)
    pb_utils.Logger.log_info("measured")
    return metric.value()
"""


@pytest.fixture(
    scope="module",
    params=["3.8", *(pytest.param(version, marks=TEST_ALL) for version in ("3.10", "3.13"))],
)
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of another Python version."""
    python = interpreter(request.param)
    return full_venv(tmp_path_factory.mktemp(f"foreign{request.param}") / "env", python)


@pytest.mark.timeout(900)  # pip downloads numpy
def test_all_features_of_models_work_on_another_python_version(
    repository: RepositoryBuilder, serve: Serve, foreign: Path
) -> None:
    names = ("identity", "ask", "misbehave", "script", "stream")
    repository.copy(*names)
    for name in names:
        path = repository.path / name / "config.pbtxt"
        path.write_text(path.read_text() + config(EXECUTION_ENV_PATH=str(foreign)))
    host = serve(repository).wait_started()
    big = np.arange(1_000_000, dtype=np.float32)
    with host.client() as client:
        assert run_script(client, "import sys; return sys.prefix") == str(foreign)
        path = run_script(client, "import sys; return sys.path")
        assert not any(part.startswith(str(ROOT)) for part in path), path
        answer = client.infer("identity", [tensor("INPUT0", big)])
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), big)
        np.testing.assert_array_equal(infer_through(client, "identity", big), big)
        status, _ = infer_error(run_command, client, "aborts")
        assert status == "StatusCode.UNAVAILABLE"
        assert run_command(client, "echo again") == "again"
        assert run_script(client, AWAITS) == [0.0, 1.0, 2.0]
        assert run_script(client, STREAMS) == [0, 1, None]
        assert run_script(client, MEASURES) == 2.0
    with InferStream(host) as stream:
        stream.send("thread:respond respond final", enable_empty_final_response=True)
        assert stream.read_numbers() == [0, 1]
    host.wait_for("measured")
    assert host.stop() == 0, host.output


def test_a_server_in_a_thread_can_use_environments(
    repository: RepositoryBuilder, packed: Path
) -> None:
    repository.add("m", EVALUATES, config(EXECUTION_ENV_PATH=str(packed)))
    no_ports = options(repository, allow_grpc=False, allow_metrics=False)
    with pbhost.BlockingServer(no_ports) as server:
        asked = np.array(["sys.prefix"], dtype=np.object_)
        (prefix,) = server.infer("m", {"COMMAND": asked})["ANSWER"]
    assert "/python_env/" in prefix.decode()
    assert not Path(prefix.decode()).exists()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_signal_prints_the_stack_of_every_thread_of_a_model(
    repository: RepositoryBuilder, serve: Serve, start: str
) -> None:
    repository.copy("misbehave")
    host = serve(repository, f"--stub-start={start}").wait_started()
    (stub,) = host.stubs("misbehave_0")

    def at_rest() -> bool:
        """The model may still be reporting that it is ready."""
        stub.send_signal(signal.SIGUSR1)
        return "in receive_work" in host.output

    wait_until(at_rest, "the stack of the main thread at rest")
    host.wait_for(r"\[misbehave:1/misbehave_0\] Current thread 0x\w+ .*\(most recent call first\):")
    host.wait_for(
        r"\[misbehave:1/misbehave_0\]   File \".*worker\.py\", line \d+ in"
        " (receive_service|_run_service_loop)"
    )
    with host.client() as client:
        assert run_command(client, "echo still here") == "still here"
