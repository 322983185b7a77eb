"""The command line of the server: flags from arguments, environment and files; deprecated flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.options.command_line import parse
from host.options.flags import Flag
from host.options.options import UsageError
from host.options.server_flags import FLAGS


def write(folder: Path, text: str) -> str:
    (folder / "serve.toml").write_text(text)
    return f"--config-file={folder / 'serve.toml'}"


def complaint(*arguments: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(arguments)
    return caught.value.detail


def test_every_kind_of_value_is_read_from_a_file(tmp_path: Path) -> None:
    text = f"""
model-repository = ["{tmp_path}", "{tmp_path}/.."]  # which can be repeated
http_port = 9000
exit-delay-secs = 1.5
allow-grpc = false
disable-auto-complete-config = true
log-format = "json"
model-control-mode = "explicit"
load-model = "one"
"""
    options = parse([write(tmp_path, text)])
    assert options.model_repository == [str(tmp_path), f"{tmp_path}/.."]
    assert (options.http_port, options.exit_delay_secs) == (9000, 1.5)
    assert (options.allow_grpc, options.disable_auto_complete_config) == (False, True)
    assert (options.log_format, options.load_model) == ("json", ["one"])


def test_variables_take_precedence_over_the_file_and_flags_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("http-port = 11", "grpc-port = 12", "metrics-port = 13", "load-model = ['c']")
    flag = write(tmp_path, "\n".join(lines))
    monkeypatch.setenv("PBHOST_MODEL_CONTROL_MODE", "explicit")
    monkeypatch.setenv("PBHOST_MODEL_REPOSITORY", str(tmp_path))
    monkeypatch.setenv("PBHOST_HTTP_PORT", "21")
    monkeypatch.setenv("PBHOST_GRPC_PORT", "22")
    monkeypatch.setenv("PBHOST_LOAD_MODEL", "a\nb")
    options = parse([flag, "--http-port=31"])
    assert (options.http_port, options.grpc_port, options.metrics_port) == (31, 22, 13)
    assert options.load_model == ["a", "b"]  # from one source only
    assert parse([flag, "--load-model=x"]).load_model == ["x"]


def test_a_variable_can_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, f"model-repository = '{tmp_path}'\nhttp-port = 5")
    monkeypatch.setenv("PBHOST_CONFIG_FILE", str(tmp_path / "serve.toml"))
    assert parse([]).http_port == 5


def test_addresses_that_kubernetes_puts_into_variables_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PBHOST_HTTP_PORT", "tcp://10.0.0.7:8000")
    monkeypatch.setenv("PBHOST_HTTP_SERVICE_HOST", "10.0.0.7")
    assert parse([f"--model-repository={tmp_path}"]).http_port == 8000


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("\nhttp-prt = 1", ":2: unrecognized option 'http-prt', did you mean 'http-port'?"),
        ("[http]\nport = 1", ":1: unrecognized option 'http'"),
        ("http-port = [1]", ":1: 'http-port' must be a text, a number or a boolean, or an array"),
        ("http-port = 'x'", ':1: Bad option: "--http-port".\nInvalid option value. Got x'),
        ("disable-auto-complete-config = 1", ":1: 'disable-auto-complete-config' must be true or"),
        ("\n\nconfig-file = 'x'", ":3: a configuration file cannot name another one"),
        ("http-port = ", ": Invalid value (at end of document)"),
    ],
    ids=["unknown", "table", "array", "number", "switch", "nested", "syntax"],
)
def test_an_invalid_file_is_named_with_its_line(tmp_path: Path, text: str, error: str) -> None:
    flag = write(tmp_path, text)
    assert complaint(flag).startswith(f"{tmp_path}/serve.toml{error}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    said = complaint(f"--config-file={tmp_path}/none.toml")
    assert said == f"cannot read '{tmp_path}/none.toml': No such file or directory"


def test_an_invalid_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PBHOST_GRPC_PORT", "many")
    assert complaint(f"--model-repository={tmp_path}") == (
        'PBHOST_GRPC_PORT: Bad option: "--grpc-port".\nInvalid option value. Got many'
    )


@pytest.mark.parametrize(
    "flag",
    [flag for flag in FLAGS if flag.kind.word in ("", "integer", "bytes")],
    ids=lambda flag: flag.name,
)
def test_the_variable_of_a_flag_is_its_name_in_capitals(
    flag: Flag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"PBHOST_{flag.name.upper().replace('-', '_')}"
    monkeypatch.setenv(variable, "maybe")
    assert complaint(f"--model-repository={tmp_path}").startswith(f"{variable}: ")


def test_a_flag_is_not_the_value_of_the_flag_before_it() -> None:
    assert complaint("--log-file", "--http-port=1") == ("option '--log-file' requires an argument")
