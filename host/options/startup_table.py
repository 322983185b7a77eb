"""The table of options that the server logs at start-up.

Source: docs/reference/protocol.md, "Start".
"""

from __future__ import annotations

from host.inference.metadata import ServerMetadata
from host.options.options import Options

_RATE_LIMIT_NAMES = {"off": "OFF", "execution_count": "EXEC_COUNT"}


def option_table_rows(server: ServerMetadata, options: Options) -> list[list[str]]:
    """Returns name and value of each option, with Triton's names and in Triton's order."""
    rows: list[tuple[str, object]] = [
        ("server_id", server.name),
        ("server_version", server.version),
        ("server_extensions", " ".join(server.extensions)),
    ]
    for index, path in enumerate(options.model_repository):
        rows.append((f"model_repository_path[{index}]", path))
    rows.append(
        ("model_control_mode", f"MODE_{options.model_control_mode.upper().replace('-', '_')}")
    )
    for index, name in enumerate(options.load_model):
        rows.append((f"startup_models_{index}", name))
    rows += [
        ("strict_model_config", int(options.disable_auto_complete_config)),
        ("model_config_name", options.model_config_name),
        ("rate_limit", _RATE_LIMIT_NAMES[options.rate_limit]),
    ]
    for index, (name, count, device) in enumerate(options.rate_limiter_resources):
        where = -1 if device is None else device
        text = f'{{"name":"{name}", "count":{count} "device":{where}}}'
        rows.append((f"rate_limit_resource[{index}]", text))
    rows.append(("pinned_memory_pool_byte_size", options.pinned_memory_pool_byte_size))
    for text in options.cuda_memory_pool_byte_size:
        device_id, _, size = text.partition(":")
        rows.append((f"cuda_memory_pool_byte_size{{{device_id}}}", size))
    rows += [
        ("min_supported_compute_capability", options.min_supported_compute_capability),
        ("strict_readiness", int(options.strict_readiness)),
        ("exit_timeout", options.exit_timeout_secs),
        ("cache_enabled", int(options.cache_settings is not None)),
    ]
    return [[name, str(value)] for name, value in rows]
