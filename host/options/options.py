"""The options of a server, and the table of them that it logs at the start.

Source: docs/reference/process.md, "Start".
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from host import lane
from host.inference.metadata import ServerMetadata
from host.metrics.latency import MetricsSettings
from host.options import validators
from host.options import validators as values
from host.options.flags import InvalidValue, check_values
from host.options.server_flags import FLAGS, ServerFlags
from host.repository.open_repository import MirrorSettings
from host.system.resources import MemoryGroup, usable_cpus
from host.tracing.trace_settings import TraceConfig
from stub.wire.paths import absolute_path

_PAGE = 4096  # bytes
_ANY_ADDRESS, _LOOPBACK = "0.0.0.0", "127.0.0.1"
_DEV_POLL_SECONDS = 0.25


class UsageError(ValueError):
    """The options are invalid. `str()` is the text for the user, `detail` only the error.

    `advice` describes a valid value, if it is known; otherwise it is empty.
    """

    def __init__(self, detail: str, usage: str = "", advice: str = "") -> None:
        super().__init__("\n".join(filter(None, [usage, detail, advice])))
        self.detail = detail
        self.advice = advice


@dataclass
class Options(ServerFlags):
    """The options of a server. Raises UsageError for invalid or unsupported values.

    `warnings`: options that are accepted but do not have their usual effect.
    """

    warnings: list[str] = field(default_factory=list, init=False, compare=False)

    stay_awake: InitVar[bool | None] = None
    """Deprecated name of `busy_poll`."""

    def __post_init__(self, stay_awake: bool | None) -> None:
        if stay_awake is not None:
            self.busy_poll = stay_awake
        if isinstance(self.model_repository, (str, os.PathLike)):
            self.model_repository = [self.model_repository]
        try:
            check_values(self, FLAGS)
            self._template_variables = validators.read_variables(
                self.template_assignments, self.template_files
            )
        except InvalidValue as error:
            raise UsageError(str(error), advice=error.advice) from None
        if self.dev:
            self._set_up_development()
        self._check_combinations()
        self.exit_timeout_secs = max(0, self.exit_timeout_secs)
        self.log_verbose = max(0, self.log_verbose)
        self.model_load_thread_count = max(1, self.model_load_thread_count)
        polls = self.model_control_mode == "poll"
        self.repository_poll_secs = max(0, self.repository_poll_secs) if polls else 0
        self.warnings += values.unused_settings(self.backend_config)
        self.warnings += self.metrics_settings.warnings
        self.warnings += self.tracing.warnings

    @property
    def template_variables(self) -> dict[str, str] | None:
        """Values of template variables by name; None without `--set` and `--set-file`."""
        return self._template_variables

    @property
    def arena_limit(self) -> int:
        """Maximum size of one process's arena in bytes."""
        if self.arena_byte_size:
            return self.arena_byte_size
        machine, group = _machine_memory(), MemoryGroup().limit()
        return machine if group is None else min(machine, _share(group))

    @property
    def receive_buffer_limit(self) -> int:
        """Maximum size in bytes of the requests that the server receives or that wait."""
        if self.receive_buffer_byte_size:
            return self.receive_buffer_byte_size
        machine, group = _machine_memory(), MemoryGroup().limit()
        return machine // 2 if group is None else min(machine // 2, _share(group))

    @property
    def environment_cache(self) -> Path:
        """The directory of built environments."""
        return _cache_directory(self.environment_cache_dir, "environments")

    @property
    def mirror_settings(self) -> MirrorSettings:
        """How repositories in object stores are fetched."""
        return MirrorSettings(
            _cache_directory(self.repository_cache_directory, "repositories"),
            self.repository_cache_byte_size,
            self.repository_parallel_reads,
            self.repository_timeout_secs,
        )

    @property
    def frontend_count(self) -> int:
        """The number of frontend processes."""
        if self.frontend_processes != "auto":
            return int(self.frontend_processes)
        cpus = int(usable_cpus())
        return min(cpus // 4, 8) if cpus >= 8 else 0

    @property
    def cache_settings(self) -> tuple[str, dict[str, str]] | None:
        """The name of the cache and its settings; None without a cache."""
        return values.cache_settings(self.cache_config)

    @property
    def tracing(self) -> TraceConfig:
        """The settings of `--trace-config`."""
        return TraceConfig.from_settings(values.trace_settings(self.trace_config))

    @property
    def rate_limiter_resources(self) -> list[tuple[str, int, int | None]]:
        """Name, count and device (None: any) of each `--rate-limit-resource`."""
        return [values.read_resource(text) for text in self.rate_limit_resource]

    @property
    def metrics_settings(self) -> MetricsSettings:
        """The settings of `--metrics-config`."""
        return MetricsSettings.from_texts(self.metrics_config)

    @property
    def metrics_host(self) -> str:
        """The address of the metrics port."""
        return self.metrics_address or self.http_address

    @property
    def poll_interval(self) -> float:
        """Seconds between two polls of the model repositories; 0 without polls."""
        return _DEV_POLL_SECONDS if self.dev else self.repository_poll_secs

    def _set_up_development(self) -> None:
        """Sets the options that `dev` stands for. Raises UsageError if another one forbids it."""
        if self.model_control_mode == "explicit":
            raise UsageError("--dev cannot be combined with --model-control-mode=explicit")
        for name in ("http_address", "grpc_address", "metrics_address"):
            address = getattr(self, name)
            if address in ("", _ANY_ADDRESS):
                setattr(self, name, _LOOPBACK)
            elif not _is_loopback(address):
                flag = name.replace("_", "-")
                raise UsageError(
                    f"--dev listens on the loopback interface only, got --{flag}={address}"
                )
        self.model_control_mode = "poll"
        self.exit_on_error = False

    def _check_combinations(self) -> None:
        if self.crash_tensor_byte_size and not self.crash_directory:
            raise UsageError("--crash-tensor-byte-size needs --crash-directory")
        if self.memory_budget and self.model_namespacing:
            raise UsageError("--memory-budget does not work with --model-namespacing.")
        if self.load_model and self.model_control_mode not in ("explicit", "on-demand"):
            raise UsageError(
                "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as"
                " well."
            )
        if "*" in self.load_model and len(self.load_model) > 1:
            raise UsageError(
                "Wildcard model name '*' must be the ONLY startup model if specified at all."
            )
        if self.frontend_count:
            self._check_frontend_processes()
        if self.api_key_file and self.openai_api_key_file:
            raise UsageError(
                "--openai-api-key-file cannot be used with --api-key-file, whose keys are for the"
                " OpenAI routes too"
            )
        if self.api_key_max_requests and not (self.api_key_file or self.openai_api_key_file):
            raise UsageError("--api-key-max-requests requires --api-key-file")
        taken: dict[tuple[str, int], str] = {}
        for service, address, port in self._listening_addresses():
            other = taken.setdefault((address, port), service)
            if other != service:
                raise UsageError(
                    f"The server cannot listen to {other} requests and {service} requests at the"
                    f" same address and port {address}:{port}"
                )

    def _check_frontend_processes(self) -> None:
        """Refuses what frontend processes cannot do."""
        if self.allow_grpc and self.grpc_engine != "h2":
            raise UsageError(
                f"--grpc-engine={self.grpc_engine} runs in the server itself, so it cannot be used"
                f" with --frontend-processes={self.frontend_processes}; use --frontend-processes=0"
            )

    def _listening_addresses(self) -> list[tuple[str, str, int]]:
        """Service, address and port of each listener that has a fixed port."""
        return [
            (service, address, port)
            for service, allowed, address, port in (
                ("HTTP", self.allow_http, self.http_address, self.http_port),
                ("GRPC", self.allow_grpc, self.grpc_address, self.grpc_port),
                ("metrics", self.allow_metrics, self.metrics_host, self.metrics_port),
            )
            if allowed and port != 0
        ]


def _cache_directory(chosen: str, name: str) -> Path:
    """The chosen directory, by default one of this name among the caches of the user."""
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    chosen = chosen or f"{user}/pbhost/{name}"
    return Path(os.path.normpath(absolute_path(os.path.expanduser(chosen))))


def _is_loopback(address: str) -> bool:
    """Whether an address is that of the loopback interface; a name must be `localhost`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _share(limit: int) -> int:
    """The share of a control group's limit that each kind of tensor memory gets, in whole pages.

    A request is copied from the memory of received requests to an arena, and a model that answers
    in its size holds the result twice: in its own memory and in its arena.
    """
    return limit // 4 // _PAGE * _PAGE


def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_RATE_LIMIT_NAMES = {"off": "OFF", "execution_count": "EXEC_COUNT"}


def option_table_rows(server: ServerMetadata, options: Options) -> list[list[str]]:
    """Returns name and value of each option, with Triton's names and in Triton's order.

    The last one, which Triton does not have, is the state of the compiled lane.
    """
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
        ("compiled_lane", lane.state),
    ]
    return [[name, str(value)] for name, value in rows]
