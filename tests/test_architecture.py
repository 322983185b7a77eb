"""The rules of the architecture: which layer imports which, and where each library is used."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGES = ("host", "stub", "pb_utils")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}

LAYERS = [
    ["host.errors", "host.lane", "host.release"],
    ["host.system"],
    ["host.config"],
    ["host.inference"],
    ["host.client"],
    ["host.recording"],
    ["host.logs"],
    ["host.crashes"],
    ["host.repository"],
    ["host.environments"],
    ["host.metrics"],
    ["host.access"],
    ["host.tracing"],
    ["host.cache"],
    ["host.options"],
    ["host.scheduling"],
    ["host.instances"],
    ["host.models"],
    ["host.remote_models"],
    ["host.ensembles"],
    ["host.health"],
    ["host.bls"],
    ["host.model_control"],
    ["host.core"],
    ["host.frontends"],
    ["host.frontend_processes"],
    ["host.server"],
    ["host.lint"],
    ["host.ray"],
    ["host.cli", "host.load_generator", "host.tuning", "host.__main__"],
    ["host.bind"],
]
"""From the lowest to the highest: a module imports from its own layer and from lower ones.

`pbhost` is the public name: it imports on first use. Only `host` itself, whose public names have
moved there, imports it.
"""

ONE_PLACE = {
    "zmq": {"host.instances.host_channel", "stub.stub_channel"},
    "grpc": {
        "host.client.aio",
        "host.client.channel",
        "host.client.grpc_transport",
        "host.frontends.grpc.grpcio_engine",
        "host.ray.replica_port",
        "host.ray.servicer",
    },
    "subprocess": {
        "host.instances.launchers",
        "host.environments.program",
        "host.bind.host",
        "host.repository.object_store.client",
    },
    "mmap": {"stub.wire.shared_file", "stub.copy_on_write"},
    "uvloop": {"host.system.event_loop"},
    "re2": {"host.options.validators"},
    "jinja2": {"host.frontends.openai.jinja_sandbox", "host.frontends.openai.template"},
    "python_multipart": {"host.frontends.openai.bodies"},
    "tokenizers": {"host.frontends.openai.model_files"},
    "ray": {
        *(
            f"host.ray.{name}"
            for name in (
                "applications",
                "model_connection",
                "model_replicas",
                "replica",
                "replica_channels",
                "replica_port",
                "sequence_router",
            )  # fmt: skip
        ),
    },
    "redis": {"host.cache.redis_store"},
    "obstore": {"host.repository.object_store.store"},
    "httptools": {"host.frontends.http1.parser", "host.load_generator.http1_connection"},
    "orjson": {"host.frontends.http.json_text"},
    "prometheus_client": {"host.metrics.exposition"},
    "onnxruntime": {"stub.backends.onnxruntime.onnx_session"},
    "tensorflow": {"stub.backends.tensorflow.graph"},
    "tensorrt": {f"stub.backends.tensorrt.{name}" for name in ("library", "runner")},
    "torch": {"stub.backends.pytorch.torch_program", "stub.backends.tensorrt.runner"},
    "opentelemetry": {"host.tracing.spans", "stub.observability"},
}
"""A library, and the only modules that may import it."""


@cache
def parse(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@cache
def imports(name: str, top_level_only: bool = False) -> tuple[str, ...]:
    """The modules that a module imports, those under TYPE_CHECKING included."""
    return tuple(_imports(parse(name), top_level_only))


def _imports(tree: ast.Module, top_level_only: bool) -> Iterator[str]:
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                full if (full := f"{node.module}.{alias.name}") in MODULES else node.module
                for alias in node.names
            )
        if not top_level_only or not isinstance(node, ast.FunctionDef):
            todo += ast.iter_child_nodes(node)


def layer(name: str) -> int | None:
    for level, prefixes in enumerate(LAYERS):
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes):
            return level
    return len(LAYERS) if name == "host" else None


def test_modules_say_what_they_are() -> None:
    assert [name for name in MODULES if not ast.get_docstring(parse(name))] == []


SUMMARY_NOUNS = {"A", "CPU", "Host", "It", "Model", "Name", "Number", "Output", "Reading"}
"""First words of summaries that are no verbs, although another summary has them with an `s`."""


def test_summaries_of_functions_are_in_one_mood() -> None:
    """A summary says "Returns the name.", not "Return the name."."""
    first: dict[str, str] = {}
    for folder in ("pbhost", *PACKAGES, "tests", "benchmarks"):
        for path in Path(ROOT, folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    if summary := ast.get_docstring(node):
                        first[summary.split()[0]] = f"{path}:{node.lineno}"
    imperative = {
        word: place
        for word, place in first.items()
        if {f"{word}s", f"{word}es", f"{word[:-1]}ies"} & first.keys() and word not in SUMMARY_NOUNS
    }
    assert not imperative


def test_no_module_of_the_host_imports_upward() -> None:
    names = [name for name in MODULES if name.startswith("host.")]
    assert [name for name in names if layer(name) is None] == [], "no place in the layers"
    upward = [
        f"{name} imports {imported}"
        for name in names
        for imported in imports(name)
        if (layer(imported) or 0) > (layer(name) or 0)
    ]
    assert upward == []


def may_import(name: str, imported: str) -> bool:
    """Whether a module of one package may import a module of another one."""
    if imported == "stub.thread_worker" and name == "host.bind.host":
        return True  # the caller's process: it is to a host what a fork server is
    match name.split(".")[0]:
        case "host":
            return imported.split(".")[0] == "pb_utils" or imported.startswith("stub.wire")
        case "stub":
            return imported.split(".")[0] == "pb_utils" and not name.startswith("stub.wire")
        case _:
            return False


def test_packages_keep_to_the_import_law() -> None:
    others = [
        (name, imported)
        for name in MODULES
        for imported in imports(name)
        if imported.split(".")[0] in PACKAGES and imported.split(".")[0] != name.split(".")[0]
    ]
    assert others
    assert [f"{name} imports {i}" for name, i in others if not may_import(name, i)] == []


def test_the_side_of_bound_functions_is_not_a_host() -> None:
    hosts = [
        f"{name} imports {imported}"
        for name in MODULES
        if name.startswith("host.bind")
        for imported in imports(name)
        if imported.startswith("host.") and not imported.startswith("host.bind")
    ]
    assert hosts == []


@pytest.mark.parametrize(
    "name",
    [
        "host.frontends.client_endpoints",
        "host.frontends.inference_core",
        *(
            f"host.frontends.grpc.{name}"
            for name in ("cached_responses", "infer_request", "infer_stream", "service")
        ),
        *(f"host.frontends.http.{name}" for name in ("infer_endpoint", "generate")),
        "host.frontends.http.inference_app",
        "host.frontend_processes.core_proxy",
        "host.frontend_processes.frontend_process",
    ],
)
def test_inference_endpoints_know_the_core_by_its_protocol_only(name: str) -> None:
    assert "host.core" not in set(imports(name))


def test_nothing_behind_the_public_name_imports_it() -> None:
    users = {name for name in MODULES for i in imports(name) if i.split(".")[0] == "pbhost"}
    assert users == {"host"}


def test_there_are_no_cycles() -> None:
    graph = {name: {i for i in imports(name) if i in MODULES and i != name} for name in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for following in graph[name]:
                visit(following, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_a_library_has_one_place() -> None:
    users: dict[str, set[str]] = {library: set() for library in ONE_PLACE}
    for name in MODULES:
        for imported in imports(name):
            if (library := imported.split(".")[0]) in users:
                users[library].add(name)
    assert users == ONE_PLACE


def test_pipes_have_no_transports() -> None:
    """uvloop closes their descriptors twice: in between, a thread may open another one."""
    called = {
        (name, node.attr)
        for name in MODULES
        for node in ast.walk(parse(name))
        if isinstance(node, ast.Attribute)
    }
    transports = {"connect_read_pipe", "connect_write_pipe"}
    assert [(name, what) for name, what in sorted(called) if what in transports] == []


def test_python_3_8_can_read_what_stubs_import() -> None:
    for name, path in MODULES.items():
        if not name.startswith("host"):
            ast.parse(path.read_text(), str(path), feature_version=(3, 8))


RUNS_CODE = {"exec", "eval", "__import__", "compile"}


def test_the_host_never_runs_a_users_code() -> None:
    calls = {
        (name, node.func.id)
        for name in MODULES
        if name.startswith("host")
        for node in ast.walk(parse(name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in RUNS_CODE
    }
    # To compile is not to run; it is how the check of a repository finds syntax errors.
    assert calls <= {("host.lint.python_file", "compile")}
    users = {name for name in MODULES if "importlib" in imports(name) and name.startswith("host")}
    # These import modules of the package itself by names that they list: the public names on first
    # use, and the module of each command.
    assert users <= {"host", "host.__main__", "host.cli.completion"}


def test_the_public_package_has_names_and_no_code_of_the_server() -> None:
    for path in Path(ROOT, "pbhost").rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        if path.stem != "_packages":
            assert not any(isinstance(node, ast.ClassDef) for node in ast.walk(tree)), path


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT)
    return {name.split(".")[0] for name in json.loads(done.stdout)}


def test_a_stub_starts_without_what_it_does_not_need() -> None:
    loaded = loaded_by("import stub.worker")
    assert not loaded & {"asyncio", "grpc", "google", "tritonclient", "torch", "host", "ml_dtypes"}


def test_a_process_of_the_load_generator_starts_without_what_it_does_not_need() -> None:
    loaded = loaded_by("import host.load_generator.worker")
    assert not loaded & {"grpc", "google", "tritonclient", "numpy", "ml_dtypes"}


def test_heavy_libraries_are_not_imported_by_the_host() -> None:
    loaded = loaded_by("import host.__main__, host.server.server, host.server.blocking_server")
    assert not loaded & {"torch", "onnxruntime", "tensorrt", "tensorflow", "opentelemetry", "ray"}


def test_a_client_loads_no_server() -> None:
    assert not loaded_by("import pbhost") & {"numpy", "grpc", "asyncio"}
    loaded = loaded_by("import pbhost; pbhost.Client, pbhost.AsyncClient")
    assert not loaded & {"uvloop", "zmq", "hpack", "jinja2", "orjson", "prometheus_client"}


def test_a_frontend_process_starts_without_what_it_does_not_need() -> None:
    loaded = loaded_by("import host.frontend_processes.frontend_process")
    assert not loaded & {"zmq", "torch", "prometheus_client"}


def test_only_the_links_know_what_carries_a_message() -> None:
    users = {name for name in MODULES if "stub.wire.ring" in imports(name)}
    assert users == {
        "host.frontend_processes.frontend_link",
        "host.instances.busy_polling",  # announces frames
        "host.instances.stub_link",
        "host.instances.ring_link",
        "host.server.composition",  # sets how long the host polls
        "stub.stub_channel",
    }


def test_names_of_shared_places_start_with_the_projects_name() -> None:
    arenas = Path(ROOT, "host/instances/arenas.py").read_text()
    link = Path(ROOT, "host/instances/stub_link.py").read_text()
    frontends = Path(ROOT, "host/frontend_processes/frontend_connection.py").read_text()
    folder = Path(ROOT, "host/system/files.py").read_text()
    assert arenas.count('create_arena_file("pbhost-') == 2
    assert 'RingFiles("pbhost-rings"' in link
    assert 'RingFiles("pbhost-frontend-rings"' in frontends
    assert '_PREFIX = "pbhost-"' in folder
