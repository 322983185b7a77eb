"""Loading a configuration from a model directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from host.config.auto_complete import complete_config
from host.config.instance_groups import InstanceSpec, instance_specs
from host.config.json_form import to_json
from host.config.model_config import (
    ConfigSettings,
    LoadedConfig,
    checked_load_name,
    config_file,
    load_config,
)
from host.errors import ErrorCode, HostError

TENSORS = """
input { name: "i" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "o" data_type: TYPE_FP32 dims: [ 1 ] }
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The directory of a Python model `m` without a configuration."""
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").touch()
    return directory


def configured(model: Path, text: str, *, strict: bool = False) -> LoadedConfig:
    (model / "config.pbtxt").write_text(text)
    return load_config(model, ConfigSettings(strict=strict))


def refusal(model: Path, text: str, *, strict: bool = False) -> HostError:
    with pytest.raises(HostError) as caught:
        configured(model, text, strict=strict).check_instances()
    return caught.value


def test_a_model_without_a_file_gets_the_default_configuration(model: Path) -> None:
    loaded = load_config(model, ConfigSettings())
    assert loaded.source is None
    config = complete_config(loaded)
    assert to_json(config).startswith('{"name":"m","platform":"","backend":"python","runtime":""')
    assert instance_specs(config) == [InstanceSpec("m_0", "CPU", 0, 0)]


def test_strict_mode_requires_a_file(model: Path) -> None:
    with pytest.raises(HostError) as caught:
        load_config(model, ConfigSettings(strict=True))
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message == (
        f"failed to open text file for read {model}/config.pbtxt: No such file or directory"
    )


def test_strict_mode_still_fills_in_defaults(model: Path) -> None:
    config = complete_config(configured(model, TENSORS, strict=True))
    assert (config.name, config.backend, config.default_model_filename) == (
        "m",
        "python",
        "model.py",
    )
    assert config.instance_group[0].name == "m"


def test_tensors_are_checked_at_once_only_in_strict_mode(model: Path) -> None:
    incomplete = 'input { name: "i" }'
    expected = "model input 'i' must specify 'data_type' for m"
    assert refusal(model, incomplete, strict=True).message.startswith(expected)
    loaded = configured(model, incomplete)
    with pytest.raises(HostError, match=expected):
        complete_config(loaded)
    completed = '{"input": [{"name": "i", "data_type": "TYPE_FP32", "dims": [1]}]}'
    assert complete_config(loaded, completed).input[0].dims == [1]


@pytest.mark.parametrize("strict", [False, True])
def test_an_unreadable_file_is_an_error_and_not_a_missing_file(model: Path, strict: bool) -> None:
    (model / "config.pbtxt").mkdir()
    with pytest.raises(HostError) as caught:
        load_config(model, ConfigSettings(strict=strict))
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message == (
        f"failed to open text file for read {model}/config.pbtxt: Is a directory"
    )


@pytest.mark.parametrize(
    ("content", "position", "byte"),
    [
        (b'name: "\xff"', "line 1, column 8", "0xff"),
        (b'# caf\xe9\nname: "a#\xe9"', "line 2, column 10", "0xe9"),
        (b"name: 'a\\'#\xe9'", "line 1, column 12", "0xe9"),
        (b"max_batch_size\xe9: 1", "line 1, column 15", "0xe9"),
        ("ä: 'ä'".encode() + b"\xc3", "line 1, column 7", "0xc3"),
    ],
)
def test_bytes_that_are_not_utf_8_are_refused_outside_of_comments(
    model: Path, content: bytes, position: str, byte: str
) -> None:
    (model / "config.pbtxt").write_bytes(content)
    with pytest.raises(HostError) as caught:
        load_config(model, ConfigSettings())
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message == (
        f"failed to read text proto from {model}/config.pbtxt: {position}: byte {byte} is not valid"
        " UTF-8"
    )


def test_bytes_that_are_not_utf_8_are_accepted_in_comments(model: Path) -> None:
    content = b"# caf\xe9 \"\nmax_batch_size: 3 # it's \xff\xfe\nname: 'm' # \xe9"
    (model / "config.pbtxt").write_bytes(content.replace(b"'m'", f"'{model.name}'".encode()))
    assert load_config(model, ConfigSettings()).config.max_batch_size == 3


def test_a_custom_configuration_is_chosen_by_name(model: Path) -> None:
    (model / "configs").mkdir()
    (model / "configs" / "big.pbtxt").write_text("max_batch_size: 8")
    (model / "config.pbtxt").write_text("max_batch_size: 2")

    def max_batch_size(config_name: str | None) -> int:
        return int(
            load_config(
                model, ConfigSettings(strict=True, config_name=config_name)
            ).config.max_batch_size
        )

    assert [max_batch_size(name) for name in (None, "big", "small", "config")] == [2, 8, 2, 2]
    assert config_file(model, "big") == model / "configs" / "big.pbtxt"
    assert config_file(model, "small") == model / "config.pbtxt"
    (model / "config.pbtxt").unlink()
    assert load_config(model, ConfigSettings(config_name="small")).config.max_batch_size == 0


def test_an_override_replaces_the_file(model: Path) -> None:
    (model / "config.pbtxt").write_text("this is not read")
    loaded = load_config(model, ConfigSettings(), override='{"max_batch_size":3}')
    assert loaded.source is None
    assert loaded.config.max_batch_size == 3
    assert loaded.config.backend == "python"


def test_an_invalid_override_is_named_in_the_error(model: Path) -> None:
    with pytest.raises(HostError) as caught:
        load_config(model, ConfigSettings(), override='{"maxbatch":3}')
    assert caught.value.message.startswith(
        "Invalid config override: failed to parse model configuration JSON: unknown field"
    )


def test_a_model_must_be_named_like_its_directory(model: Path) -> None:
    error = refusal(model, '\nname: "other"')
    assert error.code is ErrorCode.INVALID_ARG
    assert error.message == (
        "unexpected directory name 'm' for model 'other', directory name must equal model name"
        f" ({model}/config.pbtxt:2:1, field 'name')"
    )
    assert (
        load_config(model, ConfigSettings(), name="n", override='{"name":"n"}').config.name == "n"
    )


@pytest.mark.parametrize("character", ";|&$`<>()[]{}\\\"'*?~#!")
def test_shell_characters_in_a_model_name_are_refused(tmp_path: Path, character: str) -> None:
    directory = tmp_path / f"m{character}"
    directory.mkdir()
    with pytest.raises(HostError) as caught:
        load_config(directory, ConfigSettings(), override='{"backend":"python"}').check_instances()
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == "Invalid stub name: contains invalid characters"


def test_shell_characters_in_an_instance_name_are_refused(model: Path) -> None:
    error = refusal(model, 'instance_group { name: "g;h" }')
    assert error.message == (
        "Invalid stub name: contains invalid characters"
        f" ({model}/config.pbtxt:1:18, field 'instance_group[0].name')"
    )


def test_groups_of_kind_gpu_use_the_cpu_without_gpus_if_wanted(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "instance_group [ { kind: KIND_GPU gpus: [ 0, 1 ] count: 2 }, { kind: KIND_GPU } ]"
    configured(model, text)
    loaded = load_config(model, ConfigSettings(cpu_fallback=True))
    loaded.check_instances()
    assert [(spec.name, spec.kind) for spec in instance_specs(loaded.config)] == [
        ("m_0_0", "CPU"),
        ("m_0_1", "CPU"),
        ("m_1_0", "CPU"),
    ]
    (record,) = caplog.records
    assert record.getMessage() == (
        "model 'm': its instance groups of KIND_GPU run on the CPU, because there is no GPU"
        " (--gpu-fallback=cpu)"
    )
    loaded = load_config(model, ConfigSettings(cpu_fallback=True, gpus=[0, 1]))
    assert {spec.kind for spec in instance_specs(loaded.config)} == {"GPU"}
    assert len(caplog.records) == 1


def test_instance_groups_are_checked_before_the_model_is_run(model: Path) -> None:
    loaded = configured(model, "instance_group { kind: KIND_GPU }")
    with pytest.raises(HostError) as caught:
        loaded.check_instances()
    assert caught.value.message == (
        "instance group m_0 of model m has kind KIND_GPU but server does not support GPUs"
        f" ({model}/config.pbtxt:1:18, field 'instance_group[0].kind'); set KIND_CPU, or KIND_AUTO"
        " to use a GPU only if there is one; or start the server on a machine with a GPU of the"
        " required compute capability and NVIDIA's driver"
    )
    with pytest.raises(HostError):
        complete_config(loaded)
    loaded = load_config(model, ConfigSettings(gpus=[0, 1]))
    assert [spec.device_id for spec in instance_specs(complete_config(loaded))] == [0, 1]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (
            'parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "b.so" } }',
            "parameters[TRITON_BATCH_STRATEGY_PATH]",
        ),
    ],
)
def test_an_unsupported_setting_is_refused(model: Path, text: str, field: str) -> None:
    error = refusal(model, text)
    assert error.code is ErrorCode.UNSUPPORTED
    assert error.message.startswith("model 'm' cannot be loaded: ")
    assert f"remove '{field}' from its configuration ({model}/config.pbtxt:1:" in error.message


def test_unknown_backends_are_accepted_here_and_looked_up_later(model: Path) -> None:
    assert configured(model, 'backend: "own" runtime: "model.py"').config.backend == "own"


def test_settings_without_effect_are_accepted(model: Path) -> None:
    configured(
        model,
        "response_cache { enable: true } instance_group { rate_limiter { priority: 2 } } "
        'model_transaction_policy { decoupled: false } runtime: "libtriton_python.so"',
    )


def test_a_dangling_link_counts_as_a_missing_file(model: Path) -> None:
    os.symlink(model / "nowhere", model / "config.pbtxt")
    assert load_config(model, ConfigSettings()).source is None


def test_the_name_in_a_load_request_is_trimmed() -> None:
    assert checked_load_name("  m ") == "m"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "Model name cannot be empty. Please enter a valid name to deploy."),
        (" \t", "Model name cannot be empty. Please enter a valid name to deploy."),
        (
            " .. ",
            "invalid model name '..', model name must not contain path traversal characters",
        ),
        (
            "a/b",
            "invalid model name 'a/b', model name must not contain path traversal characters",
        ),
    ],
)
def test_the_name_in_a_load_request_cannot_leave_the_repository(name: str, expected: str) -> None:
    with pytest.raises(HostError) as caught:
        checked_load_name(name)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == expected


@pytest.mark.parametrize(
    "text",
    [
        "priority_levels: 2 default_priority_level: 1",
        "default_queue_policy { max_queue_size: 3 timeout_action: DELAY }",
        "priority_levels: 1 default_priority_level: 1 priority_queue_policy { key: 1 }",
        "preserve_ordering: true",
        "preferred_batch_size: [ 2, 4 ]",
    ],
)
def test_every_setting_of_the_dynamic_batcher_is_honoured(model: Path, text: str) -> None:
    configured(
        model, f"max_batch_size: 4 dynamic_batching {{ {text} }} instance_group {{ count: 2 }}"
    )


def test_an_invalid_value_for_input_memory_is_refused(model: Path) -> None:
    key = "FORCE_CPU_ONLY_INPUT_TENSORS"
    error = refusal(model, f'parameters {{ key: "{key}" value {{ string_value: "maybe" }} }}')
    assert error.code is ErrorCode.UNSUPPORTED
    assert error.message.startswith(f"Incorrect value for {key}: maybe'")
