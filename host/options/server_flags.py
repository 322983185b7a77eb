"""The command-line flags of a server: their names, types, defaults, checks and help."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from host.options import validators
from host.options import validators as values
from host.options.flags import (
    BYTES,
    LOWERCASE,
    PORT,
    SWITCH,
    FlagGroup,
    Status,
    flags_of,
    integer,
    one_of,
)
from host.options.validators import header_forward_pattern, read_policies

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
    "Repository Agent", Status.IGNORED, "the only agent is checksum, which is built in"
)
_cache = FlagGroup("Response Cache")
_rate = FlagGroup("Rate Limiter")
_shm = FlagGroup("Shared Memory")
_device = FlagGroup(
    "Memory/Device Management", Status.IGNORED, "the server process does not use GPUs"
)
_cloud = FlagGroup(
    "Sagemaker, Vertex", Status.REFUSED, "the endpoints of these platforms are not implemented"
)
_own = FlagGroup("Stub Processes")

_HONOURED = Status.HONOURED
_IGNORED = Status.IGNORED


@dataclass
class ServerFlags:
    """The value of each flag, as it was given or as it is by default."""

    # fmt: off
    id: str = _server("triton", "Identifier for this server.")
    config_file: str = _server(
        "", "TOML file with values of flags that are neither on the command line nor in an"
        " environment variable PBHOST_<FLAG>: a key is a flag's name. Triton does not have this"
        " flag.")
    dev: bool = _server(
        False, "Development mode: listen on the loopback interface only, reload a model as soon as"
        " its files or the modules that it imports change, continue if a model fails to load, and"
        " print errors with their source lines. Triton does not have this flag.", SWITCH)
    exit_timeout_secs: int = _server(
        30, "Seconds that the server waits at exit for requests in flight.")
    exit_delay_secs: float = _server(
        0.0, "Seconds at exit in which health checks already fail, but the server still accepts new"
        " requests. Triton does not have this flag.", check=values.not_negative)

    receive_buffer_byte_size: int = _server(
        0, "Maximum size in bytes of all requests together that the server receives, or that wait"
        " for a model; 0 means half of the machine's memory, or a quarter of the limit of the"
        " control group. Triton does not have this flag.", BYTES)

    api_key_file: str = _server(
        "", "File with the API keys of clients, one per line: [NAME] KEY [OPTION=VALUE ...]."
        " Options are models, rate, burst, concurrency and allow. All requests but those of health"
        " checks then need a key. The file is read again after it has changed. Triton does not have"
        " this flag.")
    api_key_max_requests: int = _server(
        0, "Inference requests in progress from which on a client with an API key may have only its"
        " equal share of them; 0 means no limit. Triton does not have this flag.", integer(0))

    log_verbose: int = _logging(
        0, "Level of verbose log lines; 0 turns them off.", values.VERBOSITY)
    log_info: bool = _logging(True, "Write log lines of level INFO.")
    log_warning: bool = _logging(True, "Write log lines of level WARNING.")
    log_error: bool = _logging(True, "Write log lines of level ERROR.")
    log_format: str = _logging(
        "default", "Format of log lines: default, ISO8601, or json (one JSON object per line).",
        check=values.log_format)
    log_file: str = _logging(
        "", "Append the log to this file instead of writing it to the console.")
    log_tail_lines: int = _logging(
        500, "Number of the newest log lines that GET /v2/logging/lines sends, for the dashboard;"
        " 0 turns it off. Triton does not have this flag.", integer(0, 10_000))

    model_repository: Sequence[StrPath] = _models(
        [], "Directory that contains model directories, or its place in an object store:"
        " s3://BUCKET/PREFIX, s3://https://HOST:PORT/BUCKET/PREFIX, gs://BUCKET/PREFIX or"
        " as://ACCOUNT/CONTAINER/PREFIX. You can repeat this flag.",
        also="model-store", check=values.repositories)
    repository_cache_directory: str = _models(
        "", "Directory for models from object stores, which several servers may share. If it is"
        " empty: $XDG_CACHE_HOME/pbhost/repositories, or ~/.cache/pbhost/repositories. Triton does"
        " not have this flag and the next three.")
    repository_cache_byte_size: int = _models(
        0, "Maximum size in bytes of the models from object stores on this machine; the least"
        " recently used ones are removed. 0: only the size of the file system limits them.", BYTES)
    repository_parallel_reads: int = _models(
        16, "Maximum number of objects, or parts of large ones, that are read from object stores at"
        " the same time.", integer(1))
    repository_timeout_secs: float = _models(
        60.0, "Time in seconds after which reading from an object store fails if no byte arrives,"
        " retries included.", check=values.seconds)
    exit_on_error: bool = _models(True, "Exit if a model fails to load at start-up.")
    disable_auto_complete_config: bool = _models(
        False, "Require complete model configurations.", SWITCH)
    strict_readiness: bool = _models(
        True, "Report the server as ready only if all models are ready.")
    model_control_mode: str = _models(
        "none", "none: load all models at start-up. poll: also load, reload and unload models when"
        " files change. explicit: load the models of --load-model, and others when clients"
        " request it. on-demand: as explicit; also, an inference request loads its model. Triton"
        " does not have on-demand.", check=values.control_mode, kind=LOWERCASE)
    repository_poll_secs: int = _models(
        15, "Seconds between two polls of the model repositories in mode poll; 0: never"
        " polls.", integer())
    load_model: list[str] = _models(
        [], "Model to load at start-up in modes explicit and on-demand; * loads all. You can repeat"
        " this flag.")
    on_demand_timeout_secs: float = _models(
        60.0, "Maximum time in seconds that a request waits for its model to load on demand. Triton"
        " does not have this flag.", check=values.seconds)
    model_config_name: str = _models(
        "", "If a model has the file configs/<name>.pbtxt, use it instead of config.pbtxt.")
    template_assignments: list[str] = _models(
        [], "Value of a template variable, as NAME=VALUE: it replaces ${NAME} in configuration"
        " files. You can repeat this flag.", check=validators.read_assignments, name="set")
    template_files: list[str] = _models(
        [], "File with a line NAME=VALUE for each template variable. You can repeat this flag;"
        " --set takes precedence.", check=validators.read_files, name="set-file")
    gpu_fallback: str = _models(
        "none", "none: a model with instances of KIND_GPU does not load on a machine without GPU."
        " cpu: its instances run on the CPU.", check=one_of("gpu-fallback", "none", "cpu"))
    memory_budget: list[str] = _models(
        [], "<bytes>: limit of the host memory of all models together. <device>:<bytes>: limit of"
        " their memory on a GPU. Models that load on demand are unloaded to make room for others."
        " You can repeat this flag. Triton does not have this flag.", check=values.memory_budget)
    model_load_thread_count: int = _models(
        4, "Maximum number of model versions that load at the same time.")
    model_load_retry_count: int = _models(
        0, "Number of retries after a model version failed to load.")
    max_initializing_instances: int = _models(
        0, "Maximum number of instances of all models that initialise at the same time; 0 means no"
        " limit. Triton does not have this flag.", integer(0))
    model_namespacing: bool = _models(
        False, "Allow models of the same name in several repositories.")
    enable_peer_access: bool = _models(
        True, "Enable GPU peer access.", status=_IGNORED,
        reason="the server process does not use GPUs")

    allow_http: bool = _http(True, "Listen for HTTP requests.")
    http_address: str = _http("0.0.0.0", "Address to listen on.")
    http_port: int = _http(8000, "Port to listen on; 0 selects a free port.", PORT)
    reuse_http_port: bool = _http(False, "Allow other servers to listen on the same port.")
    http_header_forward_pattern: str = _http(
        "", "Forward headers whose names match this regular expression to the model, as request"
        " parameters.",
        check=header_forward_pattern)
    http_thread_count: int = _http(
        8, "Number of HTTP threads.", status=_IGNORED,
        reason="one event loop serves all connections")
    http_max_input_size: int = _http(
        67108864, "Maximum size in bytes of the JSON part of a request.", BYTES,
        check=values.http_max_input_size)
    http_restricted_api: list[str] = _http(
        [], "<apis>:<key>=<value>: requests to these APIs need the header <key> with this value."
        f" You can repeat this flag. APIs are {values.NAMES}.",
        check=values.http_restriction)
    http_api_page: bool = _http(
        True, "Serve GET /docs and GET /openapi.json. Triton does not have this flag.")
    allow_recording: bool = _http(
        False, "Let clients record the requests to a model with their tensors, as pbhost record"
        " does, and read the tensors of crashes. Restrict the category recording with"
        " --http-restricted-api.")
    http_dashboard: bool = _http(
        True, "Serve GET /dashboard. Triton does not have this flag.")
    allow_openai: bool = _http(
        True, "Serve the OpenAI routes under /v1 on the HTTP port, and GET /health. Triton does not"
        " have this flag.")
    openai_api_key_file: str = _http(
        "", "File with the API keys of the OpenAI routes alone, in the form of --api-key-file."
        " Triton does not have this flag.")
    openai_cors_origins: list[str] = _http(
        [], "Origins of web pages whose scripts may use the OpenAI routes, such as"
        " https://chat.example.com, separated by commas; '*' means every page. You can repeat this"
        " flag. Triton does not have this flag.", check=values.cors_origins)
    http_header_timeout_secs: float = _http(
        60.0, "Timeout in seconds for the TLS handshake, and for the headers of a request. Triton"
        " does not have this flag and the next two.", check=values.seconds)
    http_body_timeout_secs: float = _http(
        60.0, "Period in seconds in which the client must send at least 16 KiB of a request body,"
        " and read some bytes of a pending response.", check=values.seconds)
    http_idle_timeout_secs: float = _http(
        600.0, "Timeout in seconds for connections without a request.", check=values.seconds)
    http_use_ssl: bool = _http(False, "Use TLS. Triton does not have the TLS flags for HTTP.")
    http_use_ssl_mutual: bool = _http(False, "Use TLS, and require client certificates.")
    http_server_cert: str = _http("", "PEM file with the server certificate.")
    http_server_key: str = _http("", "PEM file with the server key.")
    http_root_cert: str = _http("", "PEM file with the root certificates for client certificates.")

    allow_grpc: bool = _grpc(True, "Listen for gRPC requests.")
    grpc_address: str = _grpc("0.0.0.0", "Address to listen on.")
    grpc_port: int = _grpc(8001, "Port to listen on; 0 selects a free port.", PORT)
    reuse_grpc_port: bool = _grpc(False, "Allow other servers to listen on the same port.")
    grpc_reflection: bool = _grpc(
        True, "Let clients read the services and their messages, as grpcurl does."
    )
    grpc_header_forward_pattern: str = _grpc(
        "", "Forward metadata whose keys match this regular expression to the model, as request"
        " parameters.",
        check=header_forward_pattern)
    grpc_restricted_protocol: list[str] = _grpc(
        [], "<protocols>:<key>=<value>: requests to these protocols need the metadata"
        " triton-grpc-protocol-<key> with this value. You can repeat this flag. Protocols are"
        f" {values.NAMES}.", check=values.grpc_restriction)
    grpc_infer_thread_count: int = _grpc(
        2, "Number of inference threads.", status=_IGNORED, check=values.grpc_threads,
        reason="one event loop serves all connections")
    grpc_infer_allocation_pool_size: int = _grpc(
        8, "Number of pooled inference messages.", status=_IGNORED,
        reason="messages are not pooled")
    grpc_max_response_pool_size: int = _grpc(
        2147483647, "Maximum number of responses to one request that wait for the client to read"
        " them. The server never keeps more than 128.", check=values.grpc_response_pool)
    grpc_use_ssl: bool = _grpc(False, "Use TLS.")
    grpc_use_ssl_mutual: bool = _grpc(False, "Use TLS, and require client certificates.")
    grpc_server_cert: str = _grpc("", "PEM file with the server certificate.")
    grpc_server_key: str = _grpc("", "PEM file with the server key.")
    grpc_root_cert: str = _grpc("", "PEM file with the root certificates for client certificates.")
    grpc_infer_response_compression_level: str = _grpc(
        "none", "Compression level of responses: none, low, medium or high.",
        check=values.compression_level, kind=LOWERCASE)
    grpc_keepalive_time: int = _grpc(
        7200000, "Milliseconds between two keepalive pings of the server.")
    grpc_keepalive_timeout: int = _grpc(
        20000, "Milliseconds to wait for the reply to a ping before the connection is closed.")
    grpc_keepalive_permit_without_calls: bool = _grpc(
        False, "Send pings even if no call is in flight.")
    grpc_http2_max_pings_without_data: int = _grpc(
        2, "Maximum number of pings without data in between; 0 means no limit.")
    grpc_http2_min_recv_ping_interval_without_data: int = _grpc(
        300000, "Minimum milliseconds between two pings of a client without data in between.")
    grpc_http2_max_ping_strikes: int = _grpc(
        2, "Number of too frequent pings after which a client is disconnected; 0 means no limit.")
    grpc_max_connection_age: int = _grpc(
        0, "Maximum age of a connection in milliseconds; 0 means no limit.")
    grpc_max_connection_age_grace: int = _grpc(
        0, "Milliseconds for the calls in flight on a connection that has reached its maximum age;"
        " 0 means no limit.")
    grpc_handshake_timeout_secs: float = _grpc(
        20.0, "Timeout in seconds for the TLS handshake, and then for the HTTP/2 handshake. Triton"
        " does not have this flag and the next one.", check=values.seconds)
    grpc_body_timeout_secs: float = _grpc(
        60.0, "Period in seconds in which the client must send at least 16 KiB of an incomplete"
        " message.", check=values.seconds)

    allow_metrics: bool = _metrics(True, "Serve metrics.")
    allow_gpu_metrics: bool = _metrics(
        True, "Serve metrics of GPUs.", status=_IGNORED, reason="there are no GPU metrics")
    allow_cpu_metrics: bool = _metrics(True, "Serve metrics of the CPU.")
    metrics_address: str = _metrics("", "Address to listen on; --http-address if it is empty.")
    metrics_port: int = _metrics(8002, "Port to listen on; 0 selects a free port.", PORT)
    metrics_interval_ms: int = _metrics(
        2000, "Interval in milliseconds; CPU and memory are measured twice per interval.",
        integer(1))
    metrics_config: list[str] = _metrics(
        [], "<setting>=<value>. Settings are counter_latencies, summary_latencies,"
        " histogram_latencies (true or false) and summary_quantiles. You can repeat this flag.",
        check=values.metrics_config)

    trace_config: list[str] = _tracing(
        [], "[<mode>,]<setting>=<value>. Modes are triton and opentelemetry. Settings are"
        " level (TIMESTAMPS, TENSORS or OFF), rate, count, mode; triton,file and"
        " triton,log-frequency; opentelemetry,url. You can repeat this flag.",
        check=values.trace_config)

    backend_directory: str = _backend(
        "/opt/tritonserver/backends",
        "Directory of Python-based backends; each is a file <backend>/model.py.")
    backend_config: dict[str, dict[str, str]] = _backend(
        {}, "[<backend>,]<setting>=<value>. You can repeat this flag.",
        values.BACKEND_CONFIG, check=values.backend_config)

    repoagent_directory: str = _agent(
        "/opt/tritonserver/repoagents", "Directory of repository agents.")

    cache_config: list[str] = _cache(
        [], "<cache>,<setting>=<value>. Caches are local and redis. You can repeat this flag.",
        check=values.cache_config)
    cache_directory: str = _cache(
        "/opt/tritonserver/caches", "Directory of caches.", status=_IGNORED,
        reason="the available caches are built in")

    rate_limit: str = _rate(
        "off", "off, or execution_count: an execution starts when the resources of its instance are"
        " available.",
        check=values.rate_limit, kind=LOWERCASE)
    rate_limit_resource: list[str] = _rate(
        [], "<name>:<count>[:<device>]: the available amount of a resource. You can repeat this"
        " flag.",
        check=values.rate_resource)

    allow_client_shm: bool = _shm(
        False, "Allow clients to pass tensors in shared memory.", status=Status.HONOURED)

    pinned_memory_pool_byte_size: int = _device(
        268435456, "Size in bytes of the pinned memory pool.", BYTES,
        reason="a metric shows the value, but no memory is pinned")
    cuda_memory_pool_byte_size: list[str] = _device(
        [], "<device>:<bytes>: size of the CUDA memory pool.",
        check=values.device_sizes("cuda-memory-pool-byte-size"))
    cuda_virtual_address_size: list[str] = _device(
        [], "<device>:<bytes>: size of the CUDA virtual address space.",
        check=values.device_sizes("cuda-virtual-address-size"))
    min_supported_compute_capability: float = _device(
        6.0, "Minimum CUDA compute capability of the GPUs that instances use.", status=_HONOURED)
    buffer_manager_thread_count: int = _device(
        0, "Number of threads that copy tensors.",
        reason="tensors are copied by the process that writes or reads them")
    host_policy: list[str] = _device(
        [], "<policy>,cpu-cores=<first>-<last>[,...] or <policy>,numa-node=<number>: the CPUs, and"
        " the NUMA node of the memory, of the instances with this policy. You can repeat this"
        " flag.", status=_HONOURED, check=read_policies)
    model_load_gpu_limit: list[str] = _device(
        [], "<device>:<fraction>: maximum share of GPU memory for models.", check=values.gpu_limit)

    allow_sagemaker: bool = _cloud(False, "Listen for Sagemaker requests.")
    sagemaker_port: int = _cloud(8080, "Port to listen on.", PORT, _IGNORED)
    sagemaker_safe_port_range: str = _cloud(
        "", "<first>-<last>: ports that --sagemaker-port may have.")
    sagemaker_thread_count: int = _cloud(8, "Number of Sagemaker threads.", status=_IGNORED)
    allow_vertex_ai: bool = _cloud(False, "Listen for Vertex AI requests.")
    vertex_ai_port: int = _cloud(8080, "Port to listen on.", PORT, _IGNORED)
    vertex_ai_thread_count: int = _cloud(8, "Number of Vertex AI threads.", status=_IGNORED)
    vertex_ai_default_model: str = _cloud("", "Model that handles requests without a model name.")

    arena_byte_size: int = _own(
        0, "Maximum size in bytes of the tensor memory of each process; 0 means the size of the"
        " machine's memory, or a quarter of the limit of the control group.",
        BYTES, check=values.arena_byte_size)
    grpc_engine: str = _own(
        "h2", "Implementation of the gRPC server. h2: built in. grpcio: the grpcio library, which"
        " needs more CPU time.", check=values.grpc_engine)
    frontend_processes: str = _own(
        "0", "Number of processes that speak to clients; 0: the server does it itself. auto: a"
        " quarter of the CPUs, at most 8; 0 with less than 8 CPUs.",
        check=values.frontend_processes)
    stub_start: str = _own(
        "fork", "How processes of models start. fork: as forks of a process that has already"
        " imported what they need. spawn: as new interpreters.", check=values.stub_start)
    busy_poll: bool = _own(
        True, "Poll for up to 0.5 ms before sleeping, if the last message arrived within this time."
        " This lowers the latency and raises the CPU usage.")
    environment_cache_dir: str = _own(
        "", "Directory for environments that are built from PYTHON_REQUIREMENTS. If it is empty:"
        " $XDG_CACHE_HOME/pbhost/environments, or ~/.cache/pbhost/environments.")
    environment_timeout_secs: float = _own(
        1800.0, "Timeout in seconds for each step of unpacking or building an environment.",
        check=values.not_negative)
    debug_model: str = _own(
        "", "Run one instance of this model on the terminal, so that breakpoint() works in it. No"
        " timeout applies to this instance; it ends when the server exits.")
    crash_records: int = _own(
        32, "Number of records of crashes that are kept: what ended a process of a model, what it"
        " ran, and its last output. GET /v2/crashes lists them.", integer(0, 10_000))
    crash_directory: str = _own(
        "", "Directory where each record of a crash is also kept as a file of JSON.")
    crash_tensor_byte_size: int = _own(
        0, "Bytes of tensors that are kept with each record of a crash, in --crash-directory: those"
        " of the requests that the process ran. pbhost replay sends them again. 0 keeps none.",
        BYTES)
    quarantine_secs: float = _own(
        300.0, "Seconds for which a request is refused after it has ended two processes of its"
        " model. 0 means never.", check=values.not_negative)
    stub_load_timeout_secs: float = _own(
        0.0, "Timeout in seconds for the import of a model, then for its initialize, and for each"
        " warm-up sample. Then the process is killed. 0 means no limit.", check=values.not_negative)
    stub_grace_secs: float = _own(
        10.0, "Seconds at unload before the process of a model is killed, if all clients of its"
        " running batch have disconnected.", check=values.not_negative)
    response_send_timeout_secs: float = _own(
        60.0, "Timeout in seconds of a model's response sender that waits for a client which reads"
        " no responses.", check=values.not_negative)

    # fmt: on


FLAGS = flags_of(ServerFlags)
"""All flags except the deprecated ones, in the order of the usage text."""
