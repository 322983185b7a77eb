"""`pbhost` is the one public name: the server ignores modules `host` and `stub` of the user."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import pbhost
from tests.clients import tensor
from tests.conftest import DEADLINE, RepositoryBuilder, Serve
from tests.imported_modules import imported_by

SCRIPT = (str(Path(sys.executable).with_name("pbhost")),)
MODULE = (sys.executable, "-m", "pbhost")

ENDS = "raise SystemExit(f'the server imported {__file__}')\n"
FILES = {
    "modules": ["host.py", "stub.py", "pb_utils.py"],
    "packages": ["host/__init__.py", "stub/__init__.py", "pb_utils/__init__.py"],
    "folders": [
        "host/errors.py",
        "host/server/server.py",
        "stub/worker.py",
        "stub/stub_channel.py",
    ],
}
"""Files of the user, by how they lie there."""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("kind", "program", "start"),
    [
        ("modules", SCRIPT, "fork"),
        ("packages", MODULE, "fork"),
        ("folders", MODULE, "spawn"),
        ("packages", SCRIPT, "spawn"),
    ],
    ids=lambda value: value if isinstance(value, str) else Path(value[-1]).name,
)
def test_a_server_never_imports_modules_of_the_working_directory_or_of_the_path(
    repository: RepositoryBuilder,
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    program: tuple[str, ...],
    start: str,
) -> None:
    repository.copy("identity")
    write(tmp_path, dict.fromkeys(FILES[kind], ENDS))
    monkeypatch.chdir(tmp_path)
    flags = ("--frontend-processes=1", "--grpc-engine=h2", f"--stub-start={start}")
    environment = {"PYTHONPATH": str(tmp_path)}
    host = serve(repository, *flags, env=environment, program=program).wait_started()
    with host.client() as client:
        inputs = [tensor("INPUT0", np.ones(2, dtype=np.float32))]
        result = client.infer("identity", inputs)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.ones(2))
    assert host.stop() == 0
    assert "the server imported" not in host.output


OWN = {"host/__init__.py": "", "host/database.py": "NAME = 'mine'\n", "stub.py": "NAME = 'mine'\n"}

SERVER = """
import sys
import numpy as np
{before}
import pbhost

options = pbhost.Options(
    model_repository=[sys.argv[1]],
    grpc_port=0, http_port=0, metrics_port=0, frontend_processes="1", log_info=False,
)
with pbhost.BlockingServer(options) as server:
    {within}
    outputs = server.infer("identity", {{"INPUT0": np.ones(2, dtype=np.float32)}})
    print(outputs["OUTPUT0"].tolist())
assert (host.database.NAME, stub.NAME) == ("mine", "mine")
"""

BOUND = """
import numpy as np
import tritonclient.grpc as grpcclient
{before}
from pbhost.bind import Host, TensorSpec, batch

{within}

@batch
def double(X):
    return [X * 2]

with Host(grpc_port=0, http_port=0, metrics_port=0, log_info=False) as server:
    spec = TensorSpec(shape=(-1,), dtype=np.float32, name="X")
    server.bind("double", double, inputs=[spec], outputs=[spec])
    server.run()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        given = grpcclient.InferInput("X", (1, 2), "FP32")
        given.set_data_from_numpy(np.ones((1, 2), dtype=np.float32))
        print(client.infer("double", [given]).as_numpy("X").tolist())
assert (host.database.NAME, stub.NAME) == ("mine", "mine")
"""


def run_program(folder: Path, source: str, *arguments: str | Path) -> str:
    """Runs a program that lies beside modules of the user; returns what it prints."""
    write(folder, {**OWN, "program.py": source})
    done = subprocess.run(
        [sys.executable, folder / "program.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "PYTHONWARNINGS": "error:::__main__"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


OWN_IMPORTS = "import host.database, stub"


@pytest.mark.parametrize("order", ["before", "within"])
def test_a_program_with_modules_of_these_names_runs_a_server_and_keeps_its_own(
    repository: RepositoryBuilder, tmp_path: Path, order: str
) -> None:
    repository.copy("identity")
    source = SERVER.format(**{"before": "", "within": "pass", order: OWN_IMPORTS})
    assert run_program(tmp_path, source, repository.path) == "[1.0, 1.0]\n"


@pytest.mark.parametrize("order", ["before", "within"])
def test_a_program_with_modules_of_these_names_binds_functions_and_keeps_its_own(
    tmp_path: Path, order: str
) -> None:
    source = BOUND.format(**{"before": "", "within": "pass", order: OWN_IMPORTS})
    assert run_program(tmp_path, source) == "[[2.0, 2.0]]\n"


def test_a_program_with_another_pb_utils_is_told_so(tmp_path: Path) -> None:
    write(tmp_path, {"pb_utils.py": ""})
    source = """
        import pb_utils
        import pbhost
        try:
            pbhost.testing
        except ImportError as error:
            print(error)
    """
    assert run_program(tmp_path, textwrap.dedent(source)) == (
        "pbhost needs its own module 'pb_utils', but this process has imported"
        f" '{tmp_path}/pb_utils.py'; rename that module\n"
    )


def test_programs_that_import_from_the_former_name_get_the_same_objects(tmp_path: Path) -> None:
    source = """
        from host import BlockingServer, HostError, Options, Server
        from host.bind import Host, batch
        from host.bind.pytriton import Triton
        import pbhost.bind.pytriton
        import host
        assert (Server, Options, HostError) == (pbhost.Server, pbhost.Options, pbhost.HostError)
        assert (Host, batch) == (pbhost.bind.Host, pbhost.bind.batch)
        assert Triton is pbhost.bind.pytriton.Triton
        assert host.bind.Host is Host
        print(BlockingServer is pbhost.BlockingServer)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(source))
    done = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "program.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_every_public_name_is_there_and_a_wrong_one_is_an_attribute_error() -> None:
    assert all(hasattr(pbhost, name) for name in pbhost.__all__)
    with pytest.raises(AttributeError, match="module 'pbhost' has no attribute 'Sever'"):
        pbhost.Sever  # type: ignore[attr-defined]  # noqa: B018


def test_the_public_name_imports_nothing_of_the_server_until_it_is_used() -> None:
    statement = "import pbhost"
    assert not imported_by(statement, ["pbhost.host.server.server", "numpy", "zmq", "grpc"])
