"""The options of a server: each is a field, and a command-line flag."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from host.metrics.settings import MetricsSettings
from host.options import validators as values
from host.options.flags import (
    PORT,
    SIZE,
    SWITCH,
    FlagGroup,
    InvalidValue,
    Status,
    check_values,
    flags_of,
    integer,
)
from host.options.header_patterns import header_forward_pattern
from host.options.host_policies import read_policies
from host.tracing.config import TraceConfig

StrPath = str | os.PathLike[str]

_server = FlagGroup("Server")
_logging = FlagGroup("Logging")
_models = FlagGroup("Model Repository")
_http = FlagGroup("HTTP")
_grpc = FlagGroup("GRPC")
_metrics = FlagGroup("Metrics")
_tracing = FlagGroup("Tracing")
_backend = FlagGroup("Backend")
_agent = FlagGroup(
    "Repository Agent", Status.IGNORED, "there is none but checksum, which comes with the program"
)
_cache = FlagGroup("Response Cache")
_rate = FlagGroup("Rate Limiter")
_shm = FlagGroup("Shared Memory")
_device = FlagGroup("Memory/Device Management", Status.IGNORED, "the host itself uses no GPU")
_cloud = FlagGroup("Sagemaker, Vertex", Status.REFUSED, "these platforms' endpoints are not served")
_own = FlagGroup("Stub Processes")

_HONOURED = Status.HONOURED
_REFUSED = Status.REFUSED
_IGNORED = Status.IGNORED


class UsageError(ValueError):
    """The options cannot be used. `str()` is the text for the user, `detail` the error itself.

    `advice` says what would be valid, if that is known.
    """

    def __init__(self, detail: str, usage: str = "", advice: str = "") -> None:
        super().__init__("\n".join(filter(None, [usage, detail, advice])))
        self.detail = detail
        self.advice = advice


@dataclass
class Options:
    """The options of a server. Raises UsageError for invalid or unsupported values.

    `warnings`: options that are accepted but do not have their usual effect.
    """

    # fmt: off
    id: str = _server("triton", "Identifier for this server.")
    exit_timeout_secs: int = _server(30, "Seconds to wait at exit for requests in flight.")
    exit_delay_secs: float = _server(
        0.0, "Seconds at exit in which requests are taken although health already says that the"
        " server leaves; this flag is pbhost's own.", check=values.not_negative)

    log_verbose: int = _logging(0, "Verbose level; 0 is off.", values.VERBOSITY)
    log_info: bool = _logging(True, "Whether to log infos.")
    log_warning: bool = _logging(True, "Whether to log warnings.")
    log_error: bool = _logging(True, "Whether to log errors.")
    log_format: str = _logging(
        "default", "default, ISO8601, or json: an object on each line.", check=values.log_format)
    log_file: str = _logging("", "Append the log to this file, not to the console.")

    model_repository: Sequence[StrPath] = _models(
        [], "Directory of models; may be given several times.", also="model-store")
    exit_on_error: bool = _models(True, "Exit if a model does not load at start-up.")
    disable_auto_complete_config: bool = _models(
        False, "Require complete model configurations.", SWITCH)
    strict_readiness: bool = _models(True, "Be ready only if every model is.")
    model_control_mode: str = _models(
        "none", "none: load all models at start-up. poll: and follow changes on disk. explicit:"
        " load those of --load-model, then as clients ask.", check=values.control_mode)
    repository_poll_secs: int = _models(15, "Seconds between polls, in mode poll.", integer(0))
    load_model: list[str] = _models(
        [], "Model to load at start-up, * for all; explicit mode only. May be given several times.")
    model_config_name: str = _models(
        "", "Use configs/<name>.pbtxt of a model, if there is one, in place of config.pbtxt.")
    model_load_thread_count: int = _models(4, "How many models may load at a time.")
    model_load_retry_count: int = _models(0, "Further attempts to load a model version.")
    model_namespacing: bool = _models(
        False, "Models of several repositories may share a name.")
    enable_peer_access: bool = _models(
        True, "GPU peer access.", status=_IGNORED, reason="the host itself uses no GPU")

    allow_http: bool = _http(True, "Whether to listen for HTTP requests.")
    http_address: str = _http("0.0.0.0", "Address to listen on.")
    http_port: int = _http(8000, "Port to listen on, 0 for a free one.", PORT)
    reuse_http_port: bool = _http(False, "Let servers share the port.")
    http_header_forward_pattern: str = _http(
        "", "Headers whose name matches become request parameters.",
        check=header_forward_pattern)
    http_thread_count: int = _http(
        8, "Threads for HTTP.", status=_IGNORED, reason="one event loop serves all connections")
    http_max_input_size: int = _http(
        67108864, "Most bytes of a JSON request.", SIZE, check=values.http_max_input_size)
    http_restricted_api: list[str] = _http(
        [], "<apis>:<key>=<value>: these need the header <key>. May be given several times. APIs"
        f" are {values.NAMES}.",
        check=values.http_restriction)
    http_api_page: bool = _http(
        True, "Serve GET /docs and GET /openapi.json; this flag is pbhost's own.")
    http_header_timeout_secs: float = _http(
        60.0, "How long a client may take for the handshake of TLS, and for the head of a request;"
        " this flag and the next two are pbhost's own.", check=values.seconds)
    http_body_timeout_secs: float = _http(
        60.0, "Time in which a body must bring 16 KiB, and a client must take something of its"
        " answer.", check=values.seconds)
    http_idle_timeout_secs: float = _http(
        600.0, "How long a connection may be without a request.", check=values.seconds)
    http_use_ssl: bool = _http(False, "Use TLS; these flags are pbhost's own.")
    http_use_ssl_mutual: bool = _http(False, "Use TLS, and require client certificates.")
    http_server_cert: str = _http("", "PEM file with the server certificate.")
    http_server_key: str = _http("", "PEM file with the server key.")
    http_root_cert: str = _http("", "PEM file with the root certificate of clients.")

    allow_grpc: bool = _grpc(True, "Whether to listen for gRPC requests.")
    grpc_address: str = _grpc("0.0.0.0", "Address to listen on.")
    grpc_port: int = _grpc(8001, "Port to listen on, 0 for a free one.", PORT)
    reuse_grpc_port: bool = _grpc(False, "Let servers share the port.")
    grpc_header_forward_pattern: str = _grpc(
        "", "Metadata whose key matches become request parameters.",
        check=header_forward_pattern)
    grpc_restricted_protocol: list[str] = _grpc(
        [], "<protocols>:<key>=<value>: these need the metadata triton-grpc-protocol-<key>. May be"
        f" given several times. Protocols are {values.NAMES}.", check=values.grpc_restriction)
    grpc_infer_thread_count: int = _grpc(
        2, "Threads for inference.", status=_IGNORED, check=values.grpc_threads,
        reason="one event loop serves all connections")
    grpc_infer_allocation_pool_size: int = _grpc(
        8, "Reused messages.", status=_IGNORED, reason="messages are not made to be reused")
    grpc_max_response_pool_size: int = _grpc(
        2147483647, "Most responses to one request that a client has not taken yet; this host"
        " keeps at most 128.", check=values.grpc_response_pool)
    grpc_use_ssl: bool = _grpc(False, "Use TLS.")
    grpc_use_ssl_mutual: bool = _grpc(False, "Use TLS, and require client certificates.")
    grpc_server_cert: str = _grpc("", "PEM file with the server certificate.")
    grpc_server_key: str = _grpc("", "PEM file with the server key.")
    grpc_root_cert: str = _grpc("", "PEM file with the root certificate.")
    grpc_infer_response_compression_level: str = _grpc(
        "none", "none, low, medium or high.", check=values.compression_level)
    grpc_keepalive_time: int = _grpc(7200000, "Milliseconds between pings.")
    grpc_keepalive_timeout: int = _grpc(20000, "Milliseconds to wait for an answer to a ping.")
    grpc_keepalive_permit_without_calls: bool = _grpc(False, "Ping without calls in flight.")
    grpc_http2_max_pings_without_data: int = _grpc(2, "Pings without data; 0 is no limit.")
    grpc_http2_min_recv_ping_interval_without_data: int = _grpc(
        300000, "Milliseconds that clients must leave between pings without data.")
    grpc_http2_max_ping_strikes: int = _grpc(2, "Bad pings to accept; 0 is no limit.")
    grpc_max_connection_age: int = _grpc(0, "Milliseconds that a connection may last.")
    grpc_max_connection_age_grace: int = _grpc(0, "Milliseconds for its calls after that.")
    grpc_handshake_timeout_secs: float = _grpc(
        20.0, "How long a client may take for the handshake of TLS, and then for that of HTTP/2;"
        " this flag and the next one are pbhost's own.", check=values.seconds)
    grpc_body_timeout_secs: float = _grpc(
        60.0, "Time in which a message that has begun must bring 16 KiB.", check=values.seconds)

    allow_metrics: bool = _metrics(True, "Whether to serve metrics.")
    allow_gpu_metrics: bool = _metrics(
        True, "Whether to serve metrics of GPUs.", status=_IGNORED, reason="they are not measured")
    allow_cpu_metrics: bool = _metrics(True, "Whether to serve metrics of the CPU.")
    metrics_address: str = _metrics("", "Address to listen on; as for HTTP if not given.")
    metrics_port: int = _metrics(8002, "Port to listen on, 0 for a free one.", PORT)
    metrics_interval_ms: int = _metrics(
        2000, "The machine is measured twice in so many milliseconds.", integer(1))
    metrics_config: list[str] = _metrics(
        [], "<setting>=<value>: counter_latencies, summary_latencies, histogram_latencies (true or"
        " false), summary_quantiles.", check=values.metrics_config)

    trace_config: list[str] = _tracing(
        [], "[<mode>,]<setting>=<value>, the mode triton or opentelemetry; may be given several"
        " times. level=TIMESTAMPS, TENSORS or OFF; rate=, count=, mode=; triton,file=;"
        " triton,log-frequency=; opentelemetry,url=.",
        check=values.trace_config)

    backend_directory: str = _backend(
        "/opt/tritonserver/backends", "Folder of Python-based backends: <backend>/model.py.")
    backend_config: dict[str, dict[str, str]] = _backend(
        {}, "[<backend>,]<setting>=<value>; may be given several times.",
        values.BACKEND_CONFIG, check=values.backend_config)

    repoagent_directory: str = _agent("/opt/tritonserver/repoagents", "Where agents are.")

    cache_config: list[str] = _cache(
        [], "<cache>,<setting>=<value>, the cache local or redis; may be given several times.",
        check=values.cache_config)
    cache_directory: str = _cache(
        "/opt/tritonserver/caches", "Where to look for caches.", status=_IGNORED,
        reason="those that there are come with the program")

    rate_limit: str = _rate(
        "off", "off or execution_count: executions need the resources that instances ask for.",
        check=values.rate_limit)
    rate_limit_resource: list[str] = _rate(
        [], "<name>:<count>[:<device>], how much there is of it; may be given several times.",
        check=values.rate_resource)

    allow_client_shm: bool = _shm(
        False, "Whether clients may pass tensors by shared memory.", status=Status.HONOURED)

    pinned_memory_pool_byte_size: int = _device(
        268435456, "Pinned memory.", SIZE, reason="it is shown in metrics, and nothing is pinned")
    cuda_memory_pool_byte_size: list[str] = _device(
        [], "<device>:<bytes>", check=values.device_sizes("cuda-memory-pool-byte-size"))
    cuda_virtual_address_size: list[str] = _device(
        [], "<device>:<bytes>", check=values.device_sizes("cuda-virtual-address-size"))
    min_supported_compute_capability: float = _device(
        6.0, "Least CUDA compute capability of a GPU that instances may run on.", status=_HONOURED)
    buffer_manager_thread_count: int = _device(
        0, "Threads that copy tensors.", reason="tensors are copied where they are written or read")
    host_policy: list[str] = _device(
        [], "<policy>,cpu-cores=<first>-<last>[,...] or <policy>,numa-node=<number>: where"
        " instances run; may be given several times.", status=_HONOURED, check=read_policies)
    model_load_gpu_limit: list[str] = _device(
        [], "<device>:<fraction>", check=values.gpu_limit)

    allow_sagemaker: bool = _cloud(False, "Whether to listen for Sagemaker.")
    sagemaker_port: int = _cloud(8080, "Port to listen on.", PORT, _IGNORED)
    sagemaker_safe_port_range: str = _cloud("", "<first>-<last>")
    sagemaker_thread_count: int = _cloud(8, "Threads for Sagemaker.", status=_IGNORED)
    allow_vertex_ai: bool = _cloud(False, "Whether to listen for Vertex AI.")
    vertex_ai_port: int = _cloud(8080, "Port to listen on.", PORT, _IGNORED)
    vertex_ai_thread_count: int = _cloud(8, "Threads for Vertex AI.", status=_IGNORED)
    vertex_ai_default_model: str = _cloud("", "The model of requests without a name.")

    arena_byte_size: int = _own(
        0, "The most tensor memory that one process's arena may take; 0: the machine's memory.",
        SIZE)
    grpc_engine: str = _own(
        "h2", "What speaks gRPC to clients. h2: this host's own; grpcio: the library of that name,"
        " which needs more of the CPU.", check=values.grpc_engine)
    stub_start: str = _own(
        "fork", "fork: stubs are forks of a process with its imports done; spawn: each is a new"
        " interpreter.", check=values.stub_start)
    busy_poll: bool = _own(
        True, "Whether the host polls for at most 0.5 ms before it sleeps, if stubs and clients"
        " were quicker the last time. Latency is shorter, CPU usage higher.")
    environment_cache_dir: str = _own(
        "", "Where environments built for PYTHON_REQUIREMENTS are kept;"
        " as a rule ~/.cache/pbhost/environments.")
    environment_timeout_secs: float = _own(
        1800.0, "How long each step of unpacking or building an environment may take.",
        check=values.not_negative)
    debug_model: str = _own(
        "", "Run one instance of this model on the terminal: breakpoint() works in it, and while"
        " it waits there, nothing but the exit of the server ends it.")
    stub_load_timeout_secs: float = _own(
        0.0, "How long a stub's import of its model, then its initialize, and each sample of its"
        " warm-up may take before it is killed; 0 is no limit.", check=values.not_negative)
    stub_grace_secs: float = _own(
        10.0, "How long a stub whose callers have all gone may keep running at unload before it"
        " is killed.", check=values.not_negative)
    response_send_timeout_secs: float = _own(
        60.0, "How long a model's response sender waits for a client that takes none of the"
        " responses before it.", check=values.not_negative)

    # fmt: on
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
        except InvalidValue as error:
            raise UsageError(str(error), advice=error.advice) from None
        self._check_combinations()
        self.exit_timeout_secs = max(0, self.exit_timeout_secs)
        self.log_verbose = max(0, self.log_verbose)
        self.model_load_thread_count = max(1, self.model_load_thread_count)
        if self.model_control_mode != "poll":
            self.repository_poll_secs = 0
        elif self.repository_poll_secs <= 0:
            raise UsageError(
                "--repository-poll-secs must be greater than 0 with --model-control-mode=poll, got"
                f" {self.repository_poll_secs}"
            )
        self.warnings += values.unused_settings(self.backend_config)
        self.warnings += self.metrics_settings.warnings
        self.warnings += self.tracing.warnings

    @property
    def arena_limit(self) -> int:
        """Maximum size of one process's arena in bytes."""
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return self.arena_byte_size or pages

    @property
    def environment_cache(self) -> Path:
        """The directory of built environments."""
        user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        chosen = self.environment_cache_dir or f"{user}/pbhost/environments"
        return Path(os.path.abspath(os.path.expanduser(chosen)))

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

    def _check_combinations(self) -> None:
        if self.load_model and self.model_control_mode != "explicit":
            raise UsageError(
                "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as"
                " well."
            )
        if "*" in self.load_model and len(self.load_model) > 1:
            raise UsageError(
                "Wildcard model name '*' must be the ONLY startup model if specified at all."
            )
        taken: dict[tuple[str, int], str] = {}
        for service, address, port in self._listening_addresses():
            other = taken.setdefault((address, port), service)
            if other != service:
                raise UsageError(
                    f"The server cannot listen to {other} requests and {service} requests at the"
                    f" same address and port {address}:{port}"
                )

    def _listening_addresses(self) -> list[tuple[str, str, int]]:
        """What listens where; free ports (0) do not conflict."""
        return [
            (service, address, port)
            for service, allowed, address, port in (
                ("HTTP", self.allow_http, self.http_address, self.http_port),
                ("GRPC", self.allow_grpc, self.grpc_address, self.grpc_port),
                ("metrics", self.allow_metrics, self.metrics_host, self.metrics_port),
            )
            if allowed and port != 0
        ]


FLAGS = flags_of(Options)
"""Every flag but the deprecated ones, in the order of the usage text."""
