"""Real hosts on free ports, repositories on disk, and a check that nothing is left behind."""

from __future__ import annotations

import compileall
import gc
import importlib.util
import multiprocessing
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import psutil
import pytest
import tritonclient.grpc as grpcclient
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from host.system.files import PrivateDirectory
from tests.warm_start import CommandStarter, ForkedCommand

if TYPE_CHECKING:
    from tests.ray.hosts import RayHosts

# The same examples each time, however long they take on a loaded machine;
# `--hypothesis-profile=default` looks further.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")
# Hypothesis also tries constants of the modules that are loaded. Here, these depend on the tests
# that ran before in the same process.
providers.HypothesisProvider._local_constants = Constants()  # type: ignore[method-assign, assignment]

sys.dont_write_bytecode = False  # or each worker rewrites the assertions of all modules again

# A shell starts what runs in its background with these signals ignored, and processes inherit that.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "tests" / "models"
GRPC_ENGINE = os.environ.get("PBHOST_GRPC_ENGINE", "h2")
"""The gRPC engine of the hosts that tests start, unless a test sets another one."""
FRONTENDS = os.environ.get("PBHOST_TEST_FRONTENDS", "0")
"""`--frontend-processes` of the hosts that tests start, unless a test sets another one."""
WITHOUT_FRONTENDS = {
    "test_receive_budget.py::test_requests_count_until_a_model_takes_them": (
        "its tensors are in shared memory already, so that an instance may prefetch one request"
    ),
}
"""Tests that cannot hold with frontend processes, and why."""
RAY = os.environ.get("PBHOST_TEST_RAY", "")
"""The kind of application that tests deploy on Ray instead of hosts: `app` or `model_apps`."""
ALL = "PBHOST_TEST_ALL" in os.environ
"""Whether all tests run, loops are as long as is useful, and each host is a new interpreter."""
NEW_INTERPRETER = (sys.executable, "-m", "pbhost")
"""The `program` of a host that is no fork, so that its memory is that of a real one."""
DEADLINE = 120.0
"""Seconds that any wait of the tests may take on a loaded machine."""


def wait_until(
    condition: Callable[[], bool],
    what: str,
    seconds: float = DEADLINE,
    state: Callable[[], object] = lambda: "",
) -> None:
    """Returns once the condition holds; fails with `what` and the state when the time is over."""
    end = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {seconds} s in vain for {what} {state()}")
        pause.wait(0.01)


def _compile_test_modules(config: pytest.Config) -> None:
    """Rewrites the assertions of all test modules once, and not in each worker.

    That takes two thirds of the time of a collection.
    """
    hook = config.pluginmanager.rewrite_hook
    if not isinstance(hook, rewrite.AssertionRewritingHook):
        return  # --assert=plain

    def compile_some(paths: list[Path]) -> None:
        for path in paths:
            specification = importlib.util.spec_from_file_location(path.stem, path, loader=hook)
            assert specification is not None
            hook.exec_module(importlib.util.module_from_spec(specification))

    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    cores = len(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewrite, "exec", lambda code, names: None, raising=False)
        processes = [
            multiprocessing.get_context("fork").Process(
                target=compile_some, args=(paths[core::cores],)
            )
            for core in range(cores)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            if process.exitcode != 0:
                process.kill()
                raise RuntimeError(
                    f"a process that compiles test modules has status {process.exitcode} (None: it"
                    " takes more than 60 s), expected 0"
                )


def pytest_configure(config: pytest.Config) -> None:
    """Compiles the packages, and the tests if all are run, before the first worker starts.

    Where `PYTHONDONTWRITEBYTECODE` is set, each host would compile them again: half a second of CPU
    time for each of many hundred hosts. So this writes `__pycache__` even then.
    """
    if RAY:
        from tests.ray.conftest import ignore_warnings

        ignore_warnings(config)
    if not hasattr(config, "workerinput"):
        for package in ("pbhost", "host", "stub", "pb_utils"):
            compileall.compile_dir(ROOT / package, quiet=2)
        if config.args_source is config.ArgsSource.TESTPATHS:
            _compile_test_modules(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests without garbage collections, which take a quarter of the time.

    What is there afterwards stays, so later collections pass it over: they would take half a
    second each, and many tests ask for some.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests for `make test-all`, and those that do not hold with frontends or on Ray."""
    if RAY:
        from tests.ray.hosts import arrange

        arrange(RAY, items)
    if not ALL:
        for item in items:
            for marker in item.iter_markers("test_all"):
                item.add_marker(
                    pytest.mark.skip(reason=f"make test-all: {marker.kwargs['reason']}")
                )
    if FRONTENDS == "0":
        return
    for item in items:
        reason = WITHOUT_FRONTENDS.get(item.nodeid.rpartition("/")[2])
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


class RepositoryBuilder:
    """A model repository under a temporary folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(
        self,
        name: str,
        model: str | None = None,
        config: str | None = None,
        version: int = 1,
        files: Mapping[str, str] | None = None,
    ) -> Path:
        """Writes a model; `model` and `config` may be indented, `files` are relative to it."""
        directory = self.path / name
        (directory / str(version)).mkdir(parents=True, exist_ok=True)
        contents = dict(files or {})
        if model is not None:
            contents[f"{version}/model.py"] = model
        if config is not None:
            contents["config.pbtxt"] = config
        for relative, text in contents.items():
            self.write(directory / relative, text)
        return directory

    def write(self, path: Path, text: str) -> None:
        """Writes a file, which may be indented, at once: a host that polls may look at any time."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f"{self.path.name}.writing")
        beside.write_text(textwrap.dedent(text))
        beside.replace(path)

    def copy(self, *names: str) -> None:
        """Takes models of `tests/models`."""
        for name in names:
            shutil.copytree(
                MODELS / name, self.path / name, ignore=shutil.ignore_patterns("__pycache__")
            )


class RunningHost:
    """`pbhost serve` as a process of its own, as users start it; `under` runs it."""

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
        program: Sequence[str] = NEW_INTERPRETER,
        starter: CommandStarter | None = None,
    ) -> None:
        self._lines: list[str] = []
        self._rest = b""  # of a line that has begun
        self._changed = threading.Condition()
        environment = {
            **os.environ,
            "TRITON_SERVER_ESCAPE_LOG_MESSAGES": "0",
            "CUDA_VISIBLE_DEVICES": "",  # what instances do is the same on every machine
            **(env or {}),
        }
        reading, output = os.pipe()
        self._pipe = os.fdopen(reading, "rb", buffering=0)
        os.set_blocking(reading, False)
        self.process: subprocess.Popen[bytes] | ForkedCommand
        try:
            if starter is not None and starter.suits(environment):
                with open(os.devnull) as nothing:
                    self.process = starter.start(
                        ["serve", *arguments], environment, nothing.fileno(), output, output
                    )
            else:
                self.process = subprocess.Popen(
                    [*under, *program, "serve", *arguments],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
        finally:
            os.close(output)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0

    def _read(self) -> None:
        """Takes what it prints until it has ended: it would wait at a pipe that is full."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while selector.select() and self._take():
                pass

    def _take(self) -> bool:
        """Takes what it has printed by now: whether more may arrive."""
        with self._changed:
            if self._pipe.closed:
                return False
            while True:
                try:
                    data = os.read(self._pipe.fileno(), 1 << 16)
                except BlockingIOError:
                    return True
                *lines, self._rest = (self._rest + data).split(b"\n")
                if not data and self._rest:
                    lines, self._rest = [self._rest], b""
                self._lines += [line.decode(errors="replace") for line in lines]
                self._changed.notify_all()
                if not data:
                    return False

    @property
    def lines(self) -> list[str]:
        """The lines that it has printed by now: those before an answer are there with it."""
        self._take()
        return self._lines

    @property
    def output(self) -> str:
        """Everything that it has printed by now."""
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = DEADLINE) -> re.Match[str]:
        """The first match of the pattern in its output so far or to come."""
        end = time.monotonic() + seconds
        with self._changed:
            while True:
                found = re.search(pattern, self.output)
                if found:
                    return found
                left = end - time.monotonic()
                ended = self.process.poll() is not None and not self._reader.is_alive()
                if left <= 0 or ended:
                    pytest.fail(f"the host did not print {pattern!r}:\n{self.output}")
                self._changed.wait(min(left, 0.1))

    def wait_started(self) -> RunningHost:
        """Returns once it listens."""
        self.port = int(self.wait_for(r"Started GRPCInferenceService at \S+:(\d+)").group(1))
        return self

    @property
    def url(self) -> str:
        """For clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def http_url(self) -> str:
        """Host and port of its HTTP endpoint."""
        port = self.wait_for(r"Started HTTPService at \S+:(\d+)").group(1)
        return f"127.0.0.1:{port}"

    @property
    def metrics_url(self) -> str:
        """Host and port of its metrics."""
        port = self.wait_for(r"Started Metrics Service at \S+:(\d+)").group(1)
        return f"127.0.0.1:{port}"

    def read_metrics(self) -> str:
        """The page of its metrics."""
        with urlopen(f"http://{self.metrics_url}/metrics", timeout=DEADLINE) as answer:
            page: str = answer.read().decode()
        return page

    def client(self) -> grpcclient.InferenceServerClient:
        """A new client; use it as a context manager."""
        return grpcclient.InferenceServerClient(self.url)

    def stubs(self, instance: str = "") -> list[psutil.Process]:
        """Its live stub processes, all or those of one instance."""
        return list_stubs(self.process.pid, instance)

    def stop(self, number: int = signal.SIGTERM, seconds: float = DEADLINE) -> int:
        """Ends it as a user does; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the host did not stop:\n{self.output}")
        self._reader.join(DEADLINE)
        with self._changed:
            self._pipe.close()
        return status


def list_stubs(parent: int, instance: str = "") -> list[psutil.Process]:
    """The live stub processes below a process, all or those of one instance."""
    named: list[tuple[psutil.Process, str]] = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(parent).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                named.append((child, " ".join(child.cmdline())))
    return [
        child
        for child, line in named
        if line.strip() == f"pbhost-stub {instance}".strip()
        or (not instance and line.startswith("pbhost-stub"))
    ]


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, not named after the test: a host prints paths, and tests wait for words."""
    return tmp_path_factory.mktemp("folder")


@pytest.fixture
def repository(tmp_path: Path) -> RepositoryBuilder:
    """An empty repository."""
    path = tmp_path / "repository"
    path.mkdir()
    return RepositoryBuilder(path)


@pytest.fixture(scope="module")
def module_repository(tmp_path_factory: pytest.TempPathFactory) -> RepositoryBuilder:
    """A repository that the tests of one module share."""
    return RepositoryBuilder(tmp_path_factory.mktemp("repository"))


Serve = Callable[..., RunningHost]


def _frontend_flags(flags: Sequence[str]) -> list[str]:
    """The number of frontend processes; with these flags, there can be none."""
    if "grpcio" in (GRPC_ENGINE, *(flag.removeprefix("--grpc-engine=") for flag in flags)):
        return []
    return [f"--frontend-processes={FRONTENDS}"]


@pytest.fixture(scope="session")
def ray_hosts(check_nothing_left_behind: None) -> Iterator[RayHosts | None]:
    """What starts applications on a Ray cluster instead of hosts, if the session wants that."""
    if not RAY:
        yield None
        return
    from tests.ray import hosts

    with hosts.ray_hosts(RAY) as started:
        yield started


_starters: list[CommandStarter] = []
"""The one of this session, once a test has started a host."""


@pytest.fixture(scope="session")
def host_starter(check_nothing_left_behind: None) -> Iterator[CommandStarter | None]:
    """What forks hosts, unless each is to be a new interpreter."""
    if ALL:
        yield None
        return
    _starters.append(CommandStarter())
    yield _starters[0]
    _starters.pop().close()


def run_pbhost(
    *arguments: str | Path, given: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`pbhost` with these arguments, when it has ended; `given` is its input.

    It is a fork, as hosts are.
    """
    environment = {**os.environ, **(env or {})}
    texts = [str(argument) for argument in arguments]
    starter = _starters[0] if _starters else None
    if starter is None or not starter.suits(environment):
        return subprocess.run(
            [sys.executable, "-m", "pbhost", *texts],
            input=given, capture_output=True, text=True, timeout=DEADLINE, env=environment,
        )  # fmt: skip
    with (
        tempfile.TemporaryFile("w+") as read,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as error,
    ):
        read.write(given)
        read.seek(0)
        process = starter.start(texts, environment, read.fileno(), out.fileno(), error.fileno())
        try:
            status = process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        out.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(texts, status, out.read(), error.read())


def _serving(ray: RayHosts | None, starter: CommandStarter | None) -> Iterator[Serve]:
    hosts: list[RunningHost] = []

    def serve(
        repository: RepositoryBuilder | Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
        **start: Any,
    ) -> RunningHost:
        path = repository.path if isinstance(repository, RepositoryBuilder) else repository
        if ray is not None:
            hosts.append(ray.start(path, flags, env))
            return hosts[-1]
        host = RunningHost(
            f"--model-repository={path}",
            "--grpc-port=0",
            "--grpc-address=127.0.0.1",
            "--http-port=0",
            "--http-address=127.0.0.1",
            "--metrics-port=0",
            "--metrics-address=127.0.0.1",
            f"--grpc-engine={GRPC_ENGINE}",
            *_frontend_flags(flags),
            *flags,
            env=env,
            under=under,
            starter=None if under or start else starter,
            **start,
        )
        hosts.append(host)
        return host

    yield serve
    for host in hosts:
        host.stop()


@pytest.fixture
def serve(ray_hosts: RayHosts | None, host_starter: CommandStarter | None) -> Iterator[Serve]:
    """Starts hosts and stops them after the test."""
    yield from _serving(ray_hosts, host_starter)


@pytest.fixture(scope="module")
def module_serve(
    ray_hosts: RayHosts | None, host_starter: CommandStarter | None
) -> Iterator[Serve]:
    """Starts hosts and stops them after the module."""
    yield from _serving(ray_hosts, host_starter)


SESSION = "PBHOST_TEST_SESSION"


def _traces(session: str) -> set[str]:
    """Files of this session's hosts in shared places, and their processes."""
    found = {str(path) for path in Path("/dev/shm").glob("*pbhost*")}
    found |= {str(path) for path in Path(tempfile.gettempdir()).glob("pbhost-*")}
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(SESSION) == session:
                line = " ".join(process.cmdline())
                if "multiprocessing.resource_tracker" not in line:  # this process's own
                    found.add(f"process {process.pid}: {line}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _descriptors() -> Counter[str]:
    """The open descriptors of this process: files by name, others by kind."""
    found: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that lists the others
            found[re.sub(r":\[\d+\]$", "", str(descriptor.readlink()))] += 1
    return found


@pytest.fixture(scope="session", autouse=True)
def check_nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process, shared memory, socket folder or descriptor outlives the session.

    The session has a folder for temporary files of its own, so that others do not disturb it.
    """
    session = uuid.uuid4().hex
    with (
        tempfile.TemporaryDirectory(prefix="test-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(SESSION, session)
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        before = {str(path) for path in Path("/dev/shm").glob("*pbhost*")}
        descriptors = _descriptors()
        yield
        PrivateDirectory().close()  # the next host removes those of hosts that were killed
        wait_until(
            lambda: _traces(session) <= before,
            "no traces; left:",
            state=lambda: _traces(session) - before,
        )
        left = Counter[str]()

        def closed() -> bool:
            """Threads that are about to end may have some open."""
            gc.collect()
            nonlocal left
            left = _descriptors() - descriptors
            return left.total() <= 30

        wait_until(closed, "this process to close its descriptors", state=lambda: left)
