"""Debugging tools of model authors: `pbhost run`, and a model of a real host on the terminal."""

from __future__ import annotations

import fcntl
import os
import pstats
import pty
import queue
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.clients import tensor
from tests.conftest import DEADLINE, RepositoryBuilder, Serve, wait_until

SCALE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        print("ready as", args["model_instance_name"], args["model_version"])

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            factor = 2
            HERE
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * factor)]))
        return responses

    def finalize(self):
        print("finalized")
"""
CONFIG = """
backend: "python"
instance_group [ { count: 2 } ]
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
"""


def run(*arguments: str | Path, env: dict[str, str] | None = None) -> Any:
    """`pbhost run` with these arguments, when it has ended."""
    return subprocess.run(
        [sys.executable, "-m", "pbhost", "run", *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=DEADLINE,
        env={**os.environ, **(env or {})},
    )


class Terminal:
    """A process that has a terminal of its own, at which the test sits."""

    def __init__(self, *arguments: str | Path) -> None:
        self.output = ""
        self._master, slave = pty.openpty()
        self.modes = termios.tcgetattr(self._master)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pbhost", *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "dumb", "TRITON_SERVER_ESCAPE_LOG_MESSAGES": "0"},
        )
        os.close(slave)

    def _read(self, seconds: float) -> bool:
        """Whether there was something to read."""
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            text = os.read(self._master, 1 << 16).decode(errors="replace")
        except OSError:  # the other end is closed
            return False
        self.output += text.replace("\r\n", "\n")
        return bool(text)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in the output; the output up to the end of the match is dropped."""
        end = time.monotonic() + DEADLINE
        while True:
            found = re.search(pattern, self.output)
            if found:
                self.output = self.output[found.end() :]
                return found
            left = end - time.monotonic()
            ended = self.process.poll() is not None  # the remaining output can still be read
            if left <= 0 or (not self._read(min(left, 0.2)) and ended):
                pytest.fail(f"the terminal does not show {pattern!r}:\n{self.output}")

    def type(self, text: str) -> None:
        """As if typed, with Enter if the text has it."""
        os.write(self._master, text.encode())

    def echoes(self) -> bool:
        """Whether the terminal itself shows the typed text."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def wait(self) -> int:
        """The exit status, once all output has been read."""
        end = time.monotonic() + DEADLINE
        while self.process.poll() is None:
            self._read(0.1)
            if time.monotonic() > end:
                pytest.fail(f"the process does not end:\n{self.output}")
        while self._read(0):
            pass
        return self.process.returncode

    def close(self) -> None:
        """Ends the process if need be."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@pytest.fixture
def at_terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts pbhost on terminals, and ends it after the test."""
    terminals: list[Terminal] = []

    def start(*arguments: str | Path) -> Terminal:
        terminals.append(Terminal(*arguments))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


@pytest.fixture
def scale(repository: RepositoryBuilder) -> Path:
    """A model that doubles X."""
    return repository.add("scale", SCALE.replace("HERE", "pass"), CONFIG)


@pytest.fixture
def stopping(repository: RepositoryBuilder) -> Path:
    """One that stops at a breakpoint before."""
    return repository.add("scale", SCALE.replace("HERE", "breakpoint()"), CONFIG)


# pbhost run


def test_a_model_runs_without_a_server_and_its_outputs_are_shown(scale: Path) -> None:
    done = run(scale, "--input", "X=[1, 2.5]")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        r"ready as scale_0_0 1\n"
        r"response 1\n"
        r"  Y FP32 \[2\]\n"
        r"    \[2\., 5\.\]\n"
        r"done in \d+\.\d{3} ms\n"
        r"finalized\n",
        done.stdout,
    ), done.stdout


def test_a_file_is_sent_as_bytes(repository: RepositoryBuilder, tmp_path: Path) -> None:
    source = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            (image,) = pb_utils.get_input_tensor_by_name(requests[0], "IMAGE").as_numpy()
            tensor = pb_utils.Tensor("CODES", np.frombuffer(image, np.uint8))
            return [pb_utils.InferenceResponse([tensor])]
    """
    config = """
    input { name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "CODES" data_type: TYPE_UINT8 dims: [ -1 ] }
    """
    (tmp_path / "cat.png").write_bytes(b"\x89PNG\0\xff\0")
    done = run(
        repository.add("classify", source, config), "--input", f"IMAGE=@{tmp_path / 'cat.png'}"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"CODES UINT8 \[7\]\n +\[137, +80, +78, +71, +0, +255, +0\]\n", done.stdout)


def test_outputs_of_every_kind_can_be_read(repository: RepositoryBuilder) -> None:
    source = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            texts = np.array([["one".encode(), b"\\xff"]], dtype=object)
            request = requests[0]
            tensors = [
                pb_utils.Tensor("TEXT", texts),
                pb_utils.Tensor("LONG", np.arange(1000)),
                pb_utils.Tensor("NONE", np.empty((0, 3), dtype=bool)),
                pb_utils.get_input_tensor_by_name(request, "HALF"),
            ]
            pb_utils.Logger.log_warn("see above")
            return [pb_utils.InferenceResponse(tensors, parameters={"cost": 3})]
    """
    outputs = {
        "TEXT": ("STRING", "[ 1, 2 ]"),
        "LONG": ("INT64", "[ -1 ]"),
        "NONE": ("BOOL", "[ -1, 3 ]"),
        "HALF": ("BF16", "[ 1 ]"),
    }
    config = 'input { name: "HALF" data_type: TYPE_BF16 dims: [ 1 ] }' + "".join(
        f'output {{ name: "{name}" data_type: TYPE_{kind} dims: {dims} }}'
        for name, (kind, dims) in outputs.items()
    )
    done = run(repository.add("m", source, config), "--input", "HALF=1.5")
    assert done.returncode == 0, done.stderr
    for line in (
        'response 1, parameters {"cost":3}',
        "  TEXT BYTES [1, 2]\n    [['one', b'\\xff']]",
        "  LONG INT64 [1000]\n    [  0,   1,   2, ..., 997, 998, 999]",
        "  NONE BOOL [0, 3]\n    []",
        "  HALF BF16 [1]\n    [1.5]",
    ):
        assert line in done.stdout
    assert re.fullmatch(r"W model\.py:\d+\] see above\n", done.stderr)


def test_a_decoupled_models_responses_are_shown_one_by_one(repository: RepositoryBuilder) -> None:
    source = """
    import threading
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            print("in", threading.current_thread().name)
            for request in requests:
                sender = request.get_response_sender()
                count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
                for number in range(count):
                    out = pb_utils.Tensor("I", np.array([number], np.int32))
                    sender.send(pb_utils.InferenceResponse([out]))
                    print("sent", number)
                if count > 2:
                    error = pb_utils.TritonError("too many")
                    sender.send(pb_utils.InferenceResponse([], error))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    config = """
    model_transaction_policy { decoupled: true }
    input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "I" data_type: TYPE_INT32 dims: [ 1 ] }
    """
    model = repository.add("count", source, config)
    done = run(model, "--input", "N=2")
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.split("\n") if not line.startswith("done in")]
    one = "response {}|  I INT32 [1]|    [{}]|sent {}"
    expected = ["in MainThread", *one.format(1, 0, 0).split("|"), *one.format(2, 1, 1).split("|")]
    assert shown == [*expected, ""]
    assert "no response" in run(model, "--input", "N=0").stdout
    failed = run(model, "--input", "N=3")
    assert failed.returncode == 1
    assert failed.stderr == "response 4: error: too many\n"


def test_the_traceback_of_a_models_exception_begins_in_the_model(
    repository: RepositoryBuilder,
) -> None:
    model = repository.add("m", SCALE.replace("HERE", "factor = None + x"), CONFIG)
    done = run(model, "--input", "X=random")
    assert done.returncode == 1
    lines = done.stderr.split("\n")
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{model}/1/model.py", line 13, in execute'
    assert lines[-2].startswith("TypeError: unsupported operand")
    assert "finalized" in done.stdout

    model = repository.add("imports", "import no_such_library\n")
    done = run(model)
    assert done.returncode == 1
    lines = done.stderr.split("\n")
    assert lines[1] == f'  File "{model}/1/model.py", line 1, in <module>'
    assert lines[-2] == "ModuleNotFoundError: No module named 'no_such_library'"

    model = repository.add("leaves", "raise SystemExit('enough')\n")
    assert (run(model).returncode, run(model).stderr.split("\n")[-2]) == (1, "SystemExit: enough")


@pytest.mark.parametrize(
    ("outputs", "warnings"),
    [
        ("pb_utils.Tensor('Y', x.astype('float64'))",
         ["output 'Y' is TYPE_FP64 [2]; the configuration declares TYPE_FP32 [-1]"]),
        ("pb_utils.Tensor('Y', x.reshape(1, 2))",
         ["output 'Y' is TYPE_FP32 [1, 2]; the configuration declares TYPE_FP32 [-1]"]),
        ("", ["output 'Y' is missing; the configuration declares TYPE_FP32 [-1]"]),
        ("pb_utils.Tensor('Y', x)", []),
    ],
    ids=["type", "shape", "name", "right"],
)  # fmt: skip
def test_declared_outputs_that_are_missing_or_differ_are_warned_of(
    repository: RepositoryBuilder, outputs: str, warnings: list[str]
) -> None:
    code = SCALE.replace("HERE", f"return [pb_utils.InferenceResponse([{outputs}])]")
    done = run(repository.add("m", code, CONFIG), "--input", "X=[1, 2]")
    assert (done.returncode, done.stderr.splitlines()) == (0, [f"warning: {w}" for w in warnings])


def test_an_output_outside_the_configuration_is_an_error(repository: RepositoryBuilder) -> None:
    outputs = "pb_utils.Tensor('Y', x), pb_utils.Tensor('y', x)"
    code = SCALE.replace("HERE", f"return [pb_utils.InferenceResponse([{outputs}])]")
    done = run(repository.add("m", code, CONFIG), "--input", "X=[1, 2]")
    text = "model 'm' returned an output 'y', which its configuration does not have"
    assert done.returncode == 1
    assert f"response 1: error: {text}; the configuration has: 'Y'" in done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "class Model:\n    pass\n",
            "has no class TritonPythonModel; a model must",
        ),
        ("class TritonPythonModel:\n    pass\n", "does not implement `execute` method."),
        (
            "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n",
            "Number of InferenceResponse objects do not match the number of InferenceRequest",
        ),
    ],
    ids=["no class", "no execute", "no response"],
)
def test_what_a_model_lacks_is_told_without_a_traceback(
    repository: RepositoryBuilder, code: str, message: str
) -> None:
    done = run(repository.add("m", code, CONFIG), "--input", "X=[1, 2]")
    assert done.returncode == 1
    assert done.stderr.startswith("pbhost run: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_inputs_that_do_not_fit_are_told_with_what_is_expected(scale: Path) -> None:
    for arguments, text in {
        (): "run: the model requires more inputs:\n  --input X=VALUE  for X TYPE_FP32 [-1]\n",
        ("--input", "X=[[1]]"): "input X TYPE_FP32 [-1]: expected that shape, got [1, 1]\n",
        ("--input", "Z=1"): "the model has no input 'Z'; its inputs are\n  X TYPE_FP32 [-1]\n",
        ("--input", "X"): "expected NAME=VALUE, got 'X'; ",
        ("--count", "0"): "Provided option value is out of bound. Got 0; ",
        ("--nothing",): "unrecognized option '--nothing'; ",
    }.items():
        done = run(scale, *arguments)
        assert done.returncode == 2
        assert text in done.stderr


def test_a_model_that_ends_the_process_is_told_of(repository: RepositoryBuilder) -> None:
    code = "import os; os.fork() or os._exit(0); os.wait(); os._exit(7)"  # the child is silent
    model = repository.add("ends", SCALE.replace("HERE", code), CONFIG)
    done = run(model, "--input", "X=[1]")
    assert done.returncode == 7
    (line,) = [line for line in done.stderr.splitlines() if "os._exit" in line]
    assert line.startswith(
        f"pbhost run: os._exit(7) ends the process: {model / '1' / 'model.py'}, "
    )


def test_a_model_that_cannot_be_found_is_named(repository: RepositoryBuilder, scale: Path) -> None:
    def refused(*arguments: str | Path) -> str:
        done = run(*arguments)
        assert done.returncode == 1
        text: str = done.stderr
        return text.removeprefix("pbhost run: ").removesuffix("\n")

    assert refused("nowhere") == "'nowhere' is not a model directory"
    assert refused(repository.path) == (
        f"'{repository.path}' is a model repository, expected a model directory:"
        f" '{repository.path}/scale'"
    )
    repository.add("scale", SCALE, version=3)
    assert refused(scale, "--version", "2") == (
        "model 'scale' has no version 2; its versions are: 1, 3"
    )
    broken = repository.add("broken", SCALE, "max_batchsize: 3\n")
    assert "did you mean 'max_batch_size'" in refused(broken)
    other = repository.add("other", config="backend: 'none'")
    assert "unable to find backend library for backend 'none'" in refused(other)


def test_the_version_that_a_server_would_choose_runs_unless_another_is_named(
    repository: RepositoryBuilder, scale: Path
) -> None:
    repository.add("scale", SCALE.replace("HERE", "pass"), version=12)
    assert "ready as scale_0_0 12" in run(scale, "--input", "X=1").stdout
    assert "ready as scale_0_0 1\n" in run(scale, "--input", "X=1", "--version", "1").stdout


def test_a_python_based_backend_runs_its_model(repository: RepositoryBuilder) -> None:
    folder = repository.path.parent / "backends" / "scaler"
    folder.mkdir(parents=True)
    source = SCALE.replace("HERE", "print(pb_utils.get_model_dir(), __name__)")
    (folder / "model.py").write_text(source)
    model = repository.add("m", config=CONFIG.replace('"python"', '"scaler"'))
    done = run(model, "--input", "X=1", "--backend-directory", folder.parent)
    assert done.returncode == 0, done.stderr
    assert f"{model}/1 model\n" in done.stdout


def test_the_environment_that_a_model_names_is_where_it_runs(
    repository: RepositoryBuilder, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "activate").touch()
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nMINE=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = (
        CONFIG
        + 'parameters { key: "EXECUTION_ENV_PATH" value { string_value:'
        + f' "{environment}" }} }}'
    )
    source = SCALE.replace(
        "HERE", "import os; print('in', os.environ['MINE'], os.environ['VIRTUAL_ENV'])"
    )
    model = repository.add("m", source, config)
    done = run(model, "--input", "X=1")
    assert done.returncode == 0, done.stderr
    assert f"in 1 {environment}\n" in done.stdout
    assert run(model).returncode == 2
    (environment / "bin" / "activate").unlink()
    done = run(model, "--input", "X=1")
    assert done.returncode == 1
    assert f"Path {environment}/bin/activate does not exist." in done.stderr


def test_an_environment_without_a_name_is_none(repository: RepositoryBuilder) -> None:
    config = CONFIG + 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "" } }'
    done = run(repository.add("m", SCALE.replace("HERE", "pass"), config), "--input", "X=1")
    assert (done.returncode, done.stderr) == (0, "")


def test_many_executions_are_timed_and_profiled(scale: Path, tmp_path: Path) -> None:
    profile = tmp_path / "scale.prof"
    done = run(scale, "--input", "X=random", "--count", "7", "--profile", profile)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("response 1") == 1
    assert re.search(r"^7 runs: \S+ ms minimum, \S+ ms median, \S+ ms maximum$", done.stdout, re.M)
    assert f"profile in {profile}" in done.stdout
    calls = {
        function: count
        for (file, _, function), (count, *_) in pstats.Stats(str(profile)).stats.items()  # type: ignore[attr-defined]  # typeshed lacks it
        if file == f"{scale}/1/model.py"
    }
    assert calls == {"execute": 7}


def test_help_says_how_inputs_are_given() -> None:
    done = run("--help")
    assert done.returncode == 0
    for text in ("--input NAME=VALUE", "@FILE.npy", "@FILE  ", "random", "exit status"):
        assert text in done.stdout


def test_breakpoint_stops_a_model_that_runs_without_a_server(
    stopping: Path, at_terminal: Callable[..., Terminal]
) -> None:
    terminal = at_terminal("run", stopping, "--input", "X=[1, 2]")
    terminal.wait_for(r"model\.py\(\d+\)execute\(\)\n-> [^\n]+\n\(Pdb\) ")
    terminal.type("factor = 30\n")
    terminal.wait_for(r"\(Pdb\) ")
    terminal.type("c\n")
    terminal.wait_for(r"\[30\., 60\.\]")
    assert terminal.wait() == 0


def test_leaving_the_debugger_ends_the_run_without_a_traceback(
    stopping: Path, at_terminal: Callable[..., Terminal]
) -> None:
    terminal = at_terminal("run", stopping, "--input", "X=1")
    terminal.wait_for(r"\(Pdb\) ")
    terminal.type("q\n")
    terminal.wait_for("finalized")
    assert terminal.wait() == 1
    assert "Traceback" not in terminal.output


def test_an_exception_of_a_model_can_be_debugged_where_it_was_raised(
    repository: RepositoryBuilder, at_terminal: Callable[..., Terminal]
) -> None:
    model = repository.add("m", SCALE.replace("HERE", "x.no_such_method()"), CONFIG)
    terminal = at_terminal("run", model, "--input", "X=[4]", "--pdb")
    terminal.wait_for(r"AttributeError: [^\n]+\n> [^\n]+model\.py\(13\)execute\(\)\n")
    terminal.wait_for(r"\(Pdb\) ")
    terminal.type("p 'x is', x.tolist()\n")
    terminal.wait_for(re.escape("('x is', [4.0])"))
    terminal.type("q\n")
    terminal.wait_for("finalized")
    assert terminal.wait() == 1


# pbhost serve --debug-model


class PendingInfer:
    """An infer request to `scale` that runs while the test continues."""

    def __init__(self, port: str) -> None:
        self._client = grpcclient.InferenceServerClient(f"127.0.0.1:{port}")
        self._answers: queue.Queue[Any] = queue.Queue()
        x = tensor("X", np.ones(2, dtype=np.float32))
        self._call = self._client.async_infer(
            "scale", [x], lambda result, error: self._answers.put(error or result.as_numpy("Y"))
        )

    def cancel(self) -> None:
        """Cancels the request."""
        self._call.cancel()

    def wait(self) -> Any:
        """Waits for the response or the error, and returns it."""
        answer = self._answers.get(timeout=DEADLINE)
        self._client.close()
        return answer


def serving(
    at_terminal: Callable[..., Terminal], repository: RepositoryBuilder, *flags: str
) -> tuple[Terminal, str]:
    """A host on a terminal, and its gRPC port."""
    terminal = at_terminal(
        "serve",
        f"--model-repository={repository.path}",
        "--grpc-address=127.0.0.1",
        "--grpc-port=0",
        "--metrics-port=0",
        "--allow-http=false",
        "--debug-model=scale",
        *flags,
    )
    return terminal, terminal.wait_for(r"Started GRPCInferenceService at \S+:(\d+)").group(1)


def test_a_served_model_stops_at_breakpoints_while_its_client_waits(
    repository: RepositoryBuilder, stopping: Path, at_terminal: Callable[..., Terminal]
) -> None:
    repository.copy("identity")
    terminal, port = serving(at_terminal, repository)
    pending = PendingInfer(port)
    terminal.wait_for(r"model\.py\(\d+\)execute\(\)\n-> [^\n]+\n\(Pdb\) ")
    terminal.type("import os; print('pid', os.getpid(), requests[0].inputs()[0].name())\n")
    terminal.wait_for(r"pid \d+ X\n\(Pdb\) ")
    with grpcclient.InferenceServerClient(f"127.0.0.1:{port}") as client:
        x = np.ones(2, dtype=np.float32)
        assert client.infer("identity", [tensor("INPUT0", x)]).as_numpy("OUTPUT0").tolist() == [
            1,
            1,
        ]
        assert client.is_model_ready("scale")
    terminal.type("factor = 21\n")
    terminal.wait_for(r"\(Pdb\) ")
    terminal.type("c\n")
    assert pending.wait().tolist() == [21, 21]

    pending = PendingInfer(port)  # the same one instance of two that the configuration wants
    terminal.wait_for(r"\(Pdb\) ")
    second = PendingInfer(port)
    terminal.type("c\n")
    assert pending.wait().tolist() == [2, 2]
    terminal.wait_for(r"\(Pdb\) ")
    terminal.type("c\n")
    assert second.wait().tolist() == [2, 2]
    terminal.process.send_signal(signal.SIGTERM)
    terminal.wait_for("finalized")
    assert terminal.wait() == 0


def test_initialize_can_be_stopped_as_well(
    repository: RepositoryBuilder, at_terminal: Callable[..., Terminal]
) -> None:
    source = SCALE.replace('print("ready as"', 'breakpoint()\n        print("ready as"')
    repository.add("scale", source.replace("HERE", "pass"), CONFIG)
    terminal = at_terminal(
        "serve",
        f"--model-repository={repository.path}",
        "--grpc-port=0",
        "--metrics-port=0",
        "--allow-http=false",
        "--debug-model=scale",
    )
    terminal.wait_for(r"initialize\(\)\n-> [^\n]+\n\(Pdb\) ")
    terminal.type("c\n")
    terminal.wait_for("ready as scale_0_0 1")
    terminal.wait_for("Started GRPCInferenceService")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.wait() == 0


def test_neither_a_client_that_gives_up_nor_an_unload_ends_a_model_at_a_breakpoint(
    repository: RepositoryBuilder, stopping: Path, at_terminal: Callable[..., Terminal]
) -> None:
    terminal, port = serving(
        at_terminal,
        repository,
        "--model-control-mode=explicit",
        "--load-model=scale",
        "--stub-grace-secs=0",
    )
    pending = PendingInfer(port)
    terminal.wait_for(r"\(Pdb\) ")
    pending.cancel()
    assert pending.wait().status() == "StatusCode.CANCELLED"
    with grpcclient.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.unload_model("scale")

        def state() -> str:
            found: str = client.get_model_repository_index().models[0].state
            return found

        wait_until(lambda: state() != "READY", "the unload")
        terminal.type("p 'still', 6 * 7\n")
        terminal.wait_for(r"\('still', 42\)\n\(Pdb\) ")
        assert state() == "UNLOADING"
        terminal.type("c\n")
        terminal.wait_for("finalized")
        wait_until(lambda: state() == "UNAVAILABLE", "the end of the unload")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.wait() == 0


def test_the_exit_of_the_server_ends_a_model_at_a_breakpoint_and_mends_the_terminal(
    repository: RepositoryBuilder, stopping: Path, at_terminal: Callable[..., Terminal]
) -> None:
    terminal, port = serving(at_terminal, repository, "--exit-timeout-secs=1")
    pending = PendingInfer(port)
    terminal.wait_for(r"\(Pdb\) ")
    wait_until(lambda: not terminal.echoes(), "the line editor of the debugger")
    terminal.type("\x03")
    terminal.wait_for(r"Signal \(2\) received")
    assert terminal.wait() == 1
    assert "UNAVAILABLE" in str(pending.wait())
    assert terminal.echoes()


def test_a_debugger_without_a_terminal_quits_and_fails_its_request(
    repository: RepositoryBuilder, stopping: Path, serve: Serve
) -> None:
    repository.copy("identity")
    host = serve(repository, "--debug-model=scale").wait_started()
    assert "--debug-model: stdin is not a terminal" in host.output
    assert "none of the models" not in host.output
    answer = PendingInfer(str(host.port)).wait()
    assert "BdbQuit" in str(answer)


def test_a_debugged_model_that_is_not_there_is_mentioned(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    host = serve(repository, "--debug-model=scale").wait_started()
    assert "--debug-model: model 'scale' is not loaded at start-up" in host.output
