"""The table of options at the start."""

from __future__ import annotations

from pathlib import Path

from host.inference.metadata import ServerMetadata
from host.options.command_line import parse
from host.options.startup_table import option_table_rows

SERVER = ServerMetadata("me", "2.73.0", ["a", "b"])


def test_every_row_of_triton_is_there(tmp_path: Path) -> None:
    options = parse(
        [
            f"--model-repository={tmp_path}",
            "--model-control-mode=explicit",
            "--load-model=x",
            "--load-model=y",
            "--model-config-name=fast",
            "--rate-limit=execution_count",
            "--rate-limit-resource=R1:4",
            "--rate-limit-resource=R2:3:1",
            "--cuda-memory-pool-byte-size=0:1024",
            "--cache-config=local,size=1048576",
        ]
    )
    assert option_table_rows(SERVER, options) == [
        ["server_id", "me"],
        ["server_version", "2.73.0"],
        ["server_extensions", "a b"],
        ["model_repository_path[0]", str(tmp_path)],
        ["model_control_mode", "MODE_EXPLICIT"],
        ["startup_models_0", "x"],
        ["startup_models_1", "y"],
        ["strict_model_config", "0"],
        ["model_config_name", "fast"],
        ["rate_limit", "EXEC_COUNT"],
        ["rate_limit_resource[0]", '{"name":"R1", "count":4 "device":-1}'],
        ["rate_limit_resource[1]", '{"name":"R2", "count":3 "device":1}'],
        ["pinned_memory_pool_byte_size", "268435456"],
        ["cuda_memory_pool_byte_size{0}", "1024"],
        ["min_supported_compute_capability", "6.0"],
        ["strict_readiness", "1"],
        ["exit_timeout", "30"],
        ["cache_enabled", "1"],
    ]


def test_unset_options_are_listed_too(tmp_path: Path) -> None:
    rows = dict(option_table_rows(SERVER, parse([f"--model-repository={tmp_path}"])))
    assert (rows["model_control_mode"], rows["model_config_name"]) == ("MODE_NONE", "")
    assert (rows["rate_limit"], rows["cache_enabled"]) == ("OFF", "0")
