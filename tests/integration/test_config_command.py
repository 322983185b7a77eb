"""`pbhost config`: what a model is served with, in either form, and nothing stays behind."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from host.cli import config as config_command
from host.config.json_form import from_json
from host.config.pbtxt import parse_pbtxt
from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, wait_until

PBHOST = Path(sys.executable).with_name("pbhost")
COMPLETING = """\
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        print("I was asked")
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(16)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        return []
"""
Printed: TypeAlias = Callable[..., tuple[object, str, str]]


def config(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    called = [PBHOST, "config", *arguments]
    return subprocess.run(called, capture_output=True, text=True, timeout=DEADLINE)


@pytest.fixture
def printed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Printed:
    """Exits status, output and errors, as `config`, but in no time."""
    logger = logging.getLogger("pbhost")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)

    def run(*arguments: str | Path) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as end:
            config_command.main([str(argument) for argument in arguments])
        said = capfd.readouterr()
        return end.value.code, said.out, said.err

    return run


def test_auto_complete_config_runs_and_the_whole_configuration_is_printed(
    repository: RepositoryBuilder,
) -> None:
    model = repository.add("m", COMPLETING)
    done = config(model)
    assert done.returncode == 0
    assert "I was asked" in done.stderr
    assert done.stdout.startswith('name: "m"\nbackend: "python"\n')
    found = parse_pbtxt(done.stdout, "stdout")
    assert found.max_batch_size == 16
    assert [tensor.name for tensor in (*found.input, *found.output)] == ["x", "y"]
    assert list(found.dynamic_batching.preferred_batch_size) == [16]
    assert [group.count for group in found.instance_group] == [1]
    assert found.default_model_filename == "model.py"


def test_both_forms_say_the_same_and_become_each_other(
    repository: RepositoryBuilder, printed: Printed, tmp_path: Path
) -> None:
    model = repository.add("m", COMPLETING)
    files = [tmp_path / name for name in ("a.pbtxt", "b.json", "c.pbtxt", "d.json")]
    asked = [model, files[0], files[1], files[2]]
    for path, source in zip(files, asked, strict=True):
        status, said, _ = printed(source, f"--format={path.suffix[1:]}")
        assert status == 0
        path.write_text(said)
    assert files[0].read_text() == files[2].read_text()
    assert files[1].read_text() == files[3].read_text()
    assert from_json(files[1].read_text()) == parse_pbtxt(files[0].read_text(), "")
    assert json.loads(files[1].read_text())["max_batch_size"] == 16


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "model_repository").glob("*/config.pbtxt")),
    ids=lambda path: path.parent.name,
)
def test_a_file_survives_the_way_through_json(printed: Printed, path: Path, tmp_path: Path) -> None:
    through = tmp_path / "config.json"
    through.write_text(printed(path, "--format=json")[1])
    assert parse_pbtxt(printed(through)[1], "") == parse_pbtxt(path.read_text(), "")


def test_without_the_model_the_file_is_printed_with_what_follows_from_it(
    repository: RepositoryBuilder, printed: Printed
) -> None:
    model = repository.add("m", "raise Exception('not to be imported')", 'input { name: "x" }')
    status, said, errors = printed(model, "--no-auto-complete")
    assert (status, errors) == (0, "")
    found = parse_pbtxt(said, "")
    assert [(tensor.name, tensor.data_type) for tensor in found.input] == [("x", 0)]
    assert (found.backend, found.default_model_filename) == ("python", "model.py")
    assert found.optimization.input_pinned_memory.enable


def test_an_ensemble_needs_no_model_and_a_custom_configuration_may_be_chosen(
    repository: RepositoryBuilder, printed: Printed
) -> None:
    ensemble = """\
        platform: "ensemble"
        input {{ name: "a" data_type: {0} dims: 1 }}
        output {{ name: "b" data_type: {0} dims: 1 }}
        ensemble_scheduling {{ step {{ model_name: "m" model_version: -1
            input_map {{ key: "x" value: "a" }} output_map {{ key: "y" value: "b" }} }} }}
        """
    folder = repository.add(
        "e",
        config=ensemble.format("TYPE_FP32"),
        files={"configs/whole.pbtxt": ensemble.format("TYPE_INT32")},
    )
    status, said, _ = printed(folder)
    assert (status, parse_pbtxt(said, "").input[0].data_type) == (0, 11)
    status, said, _ = printed(folder, "--model-config-name=whole")
    assert (status, parse_pbtxt(said, "").input[0].data_type) == (0, 8)


@pytest.mark.parametrize(
    ("config", "model", "said"),
    [
        ("max_batch_sise: 1", COMPLETING, "did you mean 'max_batch_size'?"),
        (
            "max_batch_size: -1",
            COMPLETING,
            "'max_batch_size' must be non-negative value for m ({}/config.pbtxt:1:1, field '",
        ),
        (None, COMPLETING.replace("return config", "return 5"), "must return a valid"),
        (None, COMPLETING.replace("FP32", "FP31"), "TYPE_FP31"),
        (None, "def f(:", "SyntaxError: invalid syntax"),
        (None, None, "Could not determine backend for model 'm'"),
    ],
    ids=["syntax", "value", "answer", "completed", "python", "no model"],
)
def test_a_configuration_that_a_server_refuses_is_refused_with_the_same_text(
    repository: RepositoryBuilder,
    printed: Printed,
    config: str | None,
    model: str | None,
    said: str,
) -> None:
    folder = repository.add("m", model, config)
    status, output, errors = printed(folder)
    assert (status, output) == (1, "")
    assert "pbhost config: " in errors
    assert said.format(folder) in errors


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("c.pbtxt", b"\xff", "{}: line 1, column 1: byte 0xff is not valid UTF-8"),
        ("c.json", b"\xff", "failed to read {}: 'utf-8' codec can't decode byte 0xff"),
        ("c.json", b"{", "{}: failed to parse model configuration JSON: "),
        ("c.json", b"[" * 100_000, "{}: model configuration JSON is nested too deeply"),
        ("c.pbtxt", b"a {" * 10_000, "unknown field 'a' in ModelConfig"),
        ("c.pbtxt", None, "failed to open text file for read {}: No such file or directory"),
    ],
    ids=["not UTF-8", "JSON that is not UTF-8", "half", "deep JSON", "deep", "missing"],
)
def test_a_file_that_is_no_configuration_is_refused(
    printed: Printed, tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    status, output, errors = printed(path)
    assert (status, output) == (1, "")
    assert errors.startswith("pbhost config: ")
    assert said.format(path) in errors


def test_a_misuse_has_an_exit_status_of_its_own(printed: Printed) -> None:
    status, output, errors = printed("m", "--format=yaml")
    assert (status, output) == (2, "")
    assert "invalid argument for --format" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_the_command_and_the_model_process(
    repository: RepositoryBuilder, number: signal.Signals, tmp_path: Path
) -> None:
    trace = tmp_path / "asked"
    waiting = f"import threading; open({str(trace)!r}, 'w').close(); threading.Event().wait()"
    folder = repository.add("m", COMPLETING.replace('print("I was asked")', waiting))
    with subprocess.Popen([PBHOST, "config", folder], stderr=subprocess.PIPE, text=True) as process:
        wait_until(trace.exists, "the model is asked")
        stubs = psutil.Process(process.pid).children(recursive=True)
        assert stubs
        process.send_signal(number)
        assert process.wait(DEADLINE) == 1
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    wait_until(lambda: not any(stub.is_running() for stub in stubs), "the stub has ended")
