"""Checks and conversions of the values of options.

Source: docs/reference/process.md, "Flags", and docs/reference/scheduling.md,
"Instance groups".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from host.config.pbtxt import parse_assignment, parse_assignments
from host.errors import HostError
from host.options.flags import InvalidValue, ValueKind, integer, one_of
from host.repository.object_store.location import is_store_url, parse_store_url
from host.repository.open_repository import StrPath
from host.system.files import read_file
from host.system.resources import SizeOutOfBound, read_byte_size
from host.tracing.trace_settings import BATCHING, LEVELS


def read_assignments(texts: Sequence[str]) -> dict[str, str]:
    """The values of `--set`. Raises InvalidValue."""
    try:
        return dict(map(parse_assignment, texts))
    except ValueError as error:
        raise InvalidValue(str(error)) from None


def read_files(paths: Sequence[str]) -> dict[str, str]:
    """The values in the files of `--set-file`. Reads files. Raises InvalidValue."""
    found: dict[str, str] = {}
    for path in paths:
        try:
            found.update(parse_assignments(read_file(Path(path)).decode("utf-8-sig").splitlines()))
        except OSError as error:
            raise InvalidValue(f"cannot read '{path}': {error.strerror}") from None
        except ValueError as error:  # also for bytes that are not UTF-8
            raise InvalidValue(f"{path}: {error}") from None
    return found


def read_variables(assignments: Sequence[str], paths: Sequence[str]) -> dict[str, str] | None:
    """All values of template variables; None without `--set` and `--set-file`.

    Reads files. Raises InvalidValue.
    """
    if not assignments and not paths:
        return None
    return {**read_files(paths), **read_assignments(assignments)}


NAMES = (
    "health, metadata, inference, shared-memory, model-config, model-repository, statistics, trace,"
    " logging, recording"
)
CATEGORIES = frozenset(NAMES.split(", "))
"""The categories of requests that can be restricted."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")
_DEVICE = re.compile(r"[0-9]{1,4}")
_FRACTION = re.compile(r"(-?[0-9]{1,9}):(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+))")
_RESOURCE = re.compile(r"[^:]+:[0-9]+(:[0-9]+)?")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
_MAX_ARENA_BYTES = 1 << 60
_MAX_LENGTH = 1e8  # seconds; event loops limit timers to some years

log_format = one_of("log-format", "default", "ISO8601", "json")
stub_start = one_of("stub-start", "fork", "spawn")
grpc_engine = one_of("grpc-engine", "grpcio", "h2")
control_mode = one_of("model-control-mode", "none", "poll", "explicit", "on-demand")
rate_limit = one_of("rate-limit", "off", "execution_count")
# The message has the underscores that Triton writes.
compression_level = one_of("grpc_infer_response_compression_level", "none", "low", "medium", "high")


def _read_verbosity(text: str) -> int:
    level: int = {"true": 1, "false": 0}.get(text.lower(), -1)
    return level if level >= 0 else _WHOLE.read(text)


_WHOLE = integer()
VERBOSITY = ValueKind("integer", _read_verbosity)


def frontend_processes(text: str) -> None:
    """Accepts auto, and a number of processes."""
    if text != "auto" and not (text.isascii() and text.isdigit() and len(text) < 4):
        raise InvalidValue(
            f"--frontend-processes must be auto or a number of processes up to 999, got '{text}'"
        )


def not_negative(number: float) -> None:
    """Accepts zero and positive numbers."""
    if not number >= 0:
        raise InvalidValue(f"Provided option value is out of bound. Got {number}")


def seconds(number: float) -> None:
    """Accepts a positive time that a timer can wait for."""
    if not 0 < number <= _MAX_LENGTH:
        raise InvalidValue(f"Provided option value is out of bound. Got {number}")


def arena_byte_size(size: int) -> None:
    """Accepts sizes whose arena fits into a file, which is four times as long."""
    if size > _MAX_ARENA_BYTES:
        raise InvalidValue(
            f"Provided option value is out of bound. Got {size}",
            f"an arena has at most {_MAX_ARENA_BYTES} bytes",
        )


def http_max_input_size(size: int) -> None:
    """Accepts sizes of at least one byte."""
    if size <= 0:
        raise InvalidValue("Error: --http-max-input-size must be greater than 0.")


def grpc_threads(count: int) -> None:
    """Accepts 2 to 128."""
    if not 2 <= count <= 128:
        raise InvalidValue(
            "invalid argument for --grpc_infer_thread_count. Must be in the range 2 to 128."
        )


def grpc_response_pool(size: int) -> None:
    """Accepts sizes of at least one response."""
    if size <= 0:
        raise InvalidValue("Error: --grpc-max-response-pool-size must be greater than 0.")


def _restricted(flag: str, what: str) -> Callable[[Sequence[str]], dict[str, tuple[str, str]]]:
    def read(settings: Sequence[str]) -> dict[str, tuple[str, str]]:
        restricted: dict[str, tuple[str, str]] = {}
        for setting in settings:
            names, colon, rest = setting.partition(":")
            key, equals, value = rest.partition("=")
            if not (names and colon and key and equals and value):
                raise InvalidValue(
                    f"--{flag} option format is '<config name>:<setting>=<value>'. Got {setting}"
                )
            for name in names.split(","):
                if name not in CATEGORIES:
                    raise InvalidValue(f"unknown restricted {what} '{name}' ")
                if name in restricted:
                    raise InvalidValue(
                        f"restricted {what} '{name}' can not be specified in multiple config groups"
                    )
                restricted[name] = key, value
        return restricted

    return read


http_restriction = _restricted("http-restricted-api", "api")
"""Returns the name and value of the header of each restricted category. Raises InvalidValue."""

grpc_restriction = _restricted("grpc-restricted-protocol", "protocol")
"""Does the same for gRPC; the metadata key is without its prefix."""


def read_origins(texts: Sequence[str]) -> list[str]:
    """Returns the origins of web pages in texts with commas."""
    return [origin.strip() for text in texts for origin in text.split(",") if origin.strip()]


def cors_origins(texts: Sequence[str]) -> None:
    """Accepts `*`, and origins as browsers write them: scheme, host and port."""
    for origin in read_origins(texts):
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise InvalidValue(
                "--openai-cors-origins needs origins as <scheme>://<host>[:<port>], or '*'. Got"
                f" {origin}"
            )


def _split(text: str) -> tuple[str, str, str] | None:
    """Splits `[<name>,]<setting>=<value>`; returns None for other texts."""
    name, comma, rest = text.partition(",")
    setting, _, value = (rest if comma else text).partition("=")
    return (name if comma else "", setting, value) if setting and value else None


def metrics_config(settings: Sequence[str]) -> None:
    """Accepts `<setting>=<value>` texts."""
    for text in settings:
        setting, _, value = text.partition("=")  # only the value may contain commas
        if not setting or not value or "," in setting:
            raise InvalidValue(f"--metrics-config option format is <setting>=<value>. Got {text}")


def cache_config(settings: Sequence[str]) -> None:
    """Accepts `<cache>,<setting>=<value>` texts of one cache."""
    names = set()
    for text in settings:
        parts = _split(text)
        if parts is None or not parts[0]:
            raise InvalidValue(
                f"{'' if parts is None else 'No cache specified. '}--cache-config option format is"
                f" '<cache name>,<setting>=<value>'. Got {text}"
            )
        names.add(parts[0])
    if len(names) > 1:
        raise InvalidValue(
            "found multiple cache configurations, but only a single cache is currently supported"
        )


def cache_settings(settings: Sequence[str]) -> tuple[str, dict[str, str]] | None:
    """Returns the name of the cache and its settings from validated texts."""
    parts = [given for text in settings if (given := _split(text))]
    if not parts:
        return None
    return parts[0][0], {setting: value for _, setting, value in parts}


def rate_resource(settings: Sequence[str]) -> None:
    """Accepts `<name>:<count>[:<device>]` texts."""
    for text in settings:
        if not _RESOURCE.fullmatch(text):
            raise InvalidValue(
                "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or"
                f" '<resource_name>:<count>'. Got {text}"
            )


def read_resource(text: str) -> tuple[str, int, int | None]:
    """Returns name, count and device of a validated text."""
    name, count, *device = text.split(":")
    return name, int(count), int(device[0]) if device else None


def device_sizes(flag: str) -> Callable[[Sequence[str]], None]:
    """Returns a check that accepts `<device>:<bytes>` texts."""

    def check(settings: Sequence[str]) -> None:
        for text in settings:
            try:
                device, _ = _read_device_size(text)
            except ValueError:
                device = None
            if device is None:
                raise InvalidValue(f"--{flag} option format is '<device>:<bytes>'. Got {text}")

    return check


def _read_device_size(text: str) -> tuple[int | None, int]:
    """Returns the device, if there is one, and the bytes of `[<device>:]<bytes>`.

    Raises ValueError for other texts, and InvalidValue for a size that is out of bound.
    """
    device, colon, size = text.rpartition(":")
    if colon and not _DEVICE.fullmatch(device):
        raise ValueError(f"not the number of a device: {device}")
    try:
        return int(device) if colon else None, read_byte_size(size)
    except SizeOutOfBound as error:
        raise InvalidValue(
            f"Provided option value is out of bound. Got {text}", str(error)
        ) from None


def repositories(places: Sequence[StrPath]) -> None:
    """Accepts paths and the URLs of object stores."""
    for text in map(str, places):
        if is_store_url(text):
            try:
                parse_store_url(text)
            except HostError as error:
                raise InvalidValue(error.message) from None


def memory_budget(settings: Sequence[str]) -> dict[int | None, int]:
    """Returns bytes by GPU, None for the host, of `[<device>:]<bytes>` texts.

    Raises InvalidValue for other texts, and for a device that is named twice.
    """
    budget: dict[int | None, int] = {}
    for text in settings:
        try:
            device, size = _read_device_size(text)
        except ValueError:
            raise InvalidValue(
                "--memory-budget option format is '<bytes>' or '<device>:<bytes>', with bytes as in"
                f" 8589934592, 700M or 8Gi. Got {text}"
            ) from None
        if device in budget or not size:
            what = "0 bytes" if not size else "a second value for the same memory"
            raise InvalidValue(f"--memory-budget got {what}: {text}")
        budget[device] = size
    return budget


def gpu_limit(settings: Sequence[str]) -> None:
    """Accepts `<device>:<fraction>` texts with a fraction from 0 to 1."""
    for text in settings:
        match = _FRACTION.fullmatch(text)
        if match is None:
            raise InvalidValue(
                f"--model-load-gpu-limit option format is '<device>:<fraction>'. Got {text}"
            )
        device, fraction = int(match[1]), float(match[2])
        if device < 0:
            raise InvalidValue(f"expects device ID >= 0, got {device}")
        if not 0 <= fraction <= 1:
            raise InvalidValue(
                f"expects limit fraction to be in range [0.0, 1.0], got {fraction:f}"
            )


def trace_config(settings: Sequence[str]) -> None:
    """Accepts `[<mode>,]<setting>=<value>` texts with known modes and levels."""
    for text in settings:
        parts = _split(text)
        if parts is None:
            raise InvalidValue(
                f"--trace-config option format is '<mode>,<setting>=<value>'. Got {text}"
            )
        name, setting, value = parts
        if not name and setting == "level" and value.lower() not in LEVELS:
            raise InvalidValue(f"invalid value for trace level option: {value}")
        mode = name or (value if setting == "mode" else "triton")
        if mode not in ("triton", "opentelemetry"):
            raise InvalidValue(
                f"invalid value for trace mode option: {mode}. Available options are"
                ' "triton" and "opentelemetry"'
            )
        if number := _TRACE_NUMBERS.get((name, setting)):
            number.read(value)


def trace_settings(settings: Sequence[str]) -> list[tuple[str, str, str]]:
    """Returns mode or "", setting and value of each validated text."""
    return [parts for text in settings if (parts := _split(text)) is not None]


_TRACE_NUMBERS = {
    ("", "rate"): integer(0, 2**32 - 1),
    ("", "count"): integer(-1),
    ("triton", "log-frequency"): integer(0, 2**32 - 1),
    **{("opentelemetry", setting): integer(1) for setting in BATCHING},
}


def _parse_leading_integer(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise InvalidValue("stol")
    return int(text)


def _read_backend(text: str) -> tuple[str, str, str]:
    parts = _split(text)
    if parts is None:
        raise InvalidValue(
            f"--backend-config option format is '<backend name>,<setting>=<value>'. Got {text}"
        )
    return parts


def _add_backend(
    backends: dict[str, dict[str, str]], given: tuple[str, str, str]
) -> dict[str, dict[str, str]]:
    name, setting, value = given
    return {**backends, name: {**backends.get(name, {}), setting: value}}


BACKEND_CONFIG = ValueKind("string", _read_backend, _add_backend)


def backend_config(backends: Mapping[str, Mapping[str, str]]) -> None:
    """Checks the settings of the Python backend. Raises InvalidValue.

    Source: docs/reference/model-processes.md, "Options and shared memory".
    """
    given = backends.get("python", {})
    numbers = {
        key: _parse_leading_integer(text) for key, text in given.items() if key in _PYTHON_NUMBERS
    }
    for key, (least, complaint) in _PYTHON_MINIMUMS.items():
        if numbers.get(key, least) < least:
            raise InvalidValue(complaint)
    if given.get(_PYTHON_PREFIX) == "":
        raise InvalidValue("shm-region-prefix-name must at least contain one character.")


# In bytes, threads and seconds. The texts are Triton's, which says 4 MiBs for a limit of 1 MiB.
_PYTHON_MINIMUMS = {
    "shm-default-byte-size": (1 << 20, "shm-default-byte-size can't be smaller than 4 MiBs"),
    "shm-growth-byte-size": (1, "shm-growth-byte-size can't be smaller than or equal to zero."),
    "thread-pool-size": (1, "thread-pool-size can't be less than 1."),
    "stub-timeout-seconds": (1, "stub-timeout-seconds can't be smaller than or equal to zero."),
}
_PYTHON_NUMBERS = (*_PYTHON_MINIMUMS, "shm_message_queue_size")
_PYTHON_PREFIX = "shm-region-prefix-name"


_ONNX_KEYS = ("default-max-batch-size", "intra_op_thread_count", "inter_op_thread_count")
_KEYS_OF_BACKENDS: dict[str, Collection[str]] = {
    "": ("default-max-batch-size",),
    "python": (*_PYTHON_NUMBERS, _PYTHON_PREFIX),
    "onnxruntime": _ONNX_KEYS,
    "pytorch": ("default-max-batch-size",),
    "tensorflow": ("default-max-batch-size",),
    "tensorrt": ("plugins", "version-compatible"),
}


def unused_settings(backends: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Returns warnings about settings that no backend reads."""
    return [
        f"--backend-config: setting '{key}' of {f'backend {name!r}' if name else 'all backends'}"
        " is not used by this version"
        for name, settings in backends.items()
        for key in settings
        if key not in _KEYS_OF_BACKENDS.get(name, ())
    ]


def header_pattern(pattern: str) -> Any:
    """Compiles a pattern of header names; its `search` takes a name. Raises InvalidValue.

    RE2 does not backtrack: the time of a search is proportional to the length of the name. A
    pattern whose compiled form takes more than 1 MiB is refused.
    """
    import re2  # imported here because it takes a megabyte, and few servers need it

    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    try:
        return re2.compile(f"(?i){pattern}", options)
    except re2.error as error:
        reason = error.args[0]
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise InvalidValue(
            f"invalid regular expression: {text}. Got {pattern}; the syntax is that of RE2"
        ) from None


def header_forward_pattern(pattern: str) -> None:
    """Raises InvalidValue for a pattern that cannot be compiled. An empty pattern is valid."""
    if pattern:
        header_pattern(pattern)


_CORE_RANGES = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?")
_MAX_CORE = 1 << 16  # the maximum number of a CPU or NUMA node


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """The CPUs that a process may run on (empty: all), and the NUMA node of its memory."""

    name: str
    cores: Sequence[int] = ()
    node: int | None = None


HostPolicies = Mapping[str, HostPolicy]
"""Policies by name."""


def read_policies(settings: Sequence[str]) -> HostPolicies:
    """Parses `<policy>,<setting>=<value>` texts; the last value of a setting counts.

    Raises InvalidValue.
    """
    policies: dict[str, HostPolicy] = {}
    for text in settings:
        name, comma, rest = text.partition(",")
        setting, _, value = rest.partition("=")
        if not (name and comma and setting and value):
            raise InvalidValue(
                f"--host-policy option format is '<policy name>,<setting>=<value>'. Got {text}"
            )
        policy = policies.get(name, HostPolicy(name))
        if setting == "cpu-cores":
            policies[name] = replace(policy, cores=_read_cores(value))
        elif setting == "numa-node":
            policies[name] = replace(policy, node=_read_node(value))
        else:
            raise InvalidValue(
                f"Unsupported host policy setting '{setting}' is specified, supported settings"
                " are 'numa-node', 'cpu-cores'"
            )
    return policies


def _read_cores(text: str) -> list[int]:
    cores: set[int] = set()
    for part in text.split(","):
        lower, _, upper = part.partition("-")
        fits = _CORE_RANGES.fullmatch(part) is not None
        if not fits or not int(lower) <= int(upper or lower) < _MAX_CORE:
            raise InvalidValue(
                "host policy setting 'cpu-cores' format is"
                f" '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got {part}"
            )
        cores.update(range(int(lower), int(upper or lower) + 1))
    return sorted(cores)


def _read_node(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) >= _MAX_CORE:
        raise InvalidValue(
            f"host policy setting 'numa-node' must be the number of a NUMA node. Got {text}"
        )
    return int(text)


def find_policy(policies: HostPolicies, kind: str, device: int, named: str) -> HostPolicy:
    """Returns the policy of an instance; `named` is the `host_policy` of its instance group.

    Without `named`, the kind of the instance selects the policy: `cpu`, `gpu_0`, ...
    """
    name = named or (f"gpu_{device}" if kind == "GPU" else kind.lower())
    return policies.get(name, HostPolicy(name))
