"""The types of the flags of a host; `python -m tests.host_flags` writes this module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class HostFlags(TypedDict, total=False):
    """The flags of `pbhost serve`, which the command line describes; None is the default."""

    id: str | None
    config_file: str | None
    exit_timeout_secs: int | None
    exit_delay_secs: float | None
    receive_buffer_byte_size: int | str | None
    api_key_file: str | None
    api_key_max_requests: int | None
    log_verbose: int | None
    log_info: bool | None
    log_warning: bool | None
    log_error: bool | None
    log_format: str | None
    log_file: str | None
    log_tail_lines: int | None
    repository_cache_directory: str | None
    repository_cache_byte_size: int | str | None
    repository_parallel_reads: int | None
    repository_timeout_secs: float | None
    exit_on_error: bool | None
    strict_readiness: bool | None
    model_control_mode: str | None
    repository_poll_secs: int | None
    load_model: str | Sequence[str] | None
    on_demand_timeout_secs: float | None
    model_config_name: str | None
    set: str | Sequence[str] | None
    set_file: str | Sequence[str] | None
    gpu_fallback: str | None
    memory_budget: str | Sequence[str] | None
    model_load_thread_count: int | None
    model_load_retry_count: int | None
    max_initializing_instances: int | None
    model_namespacing: bool | None
    enable_peer_access: bool | None
    allow_http: bool | None
    http_address: str | None
    http_port: int | None
    reuse_http_port: bool | None
    http_header_forward_pattern: str | None
    http_thread_count: int | None
    http_max_input_size: int | str | None
    http_restricted_api: str | Sequence[str] | None
    http_api_page: bool | None
    allow_recording: bool | None
    http_dashboard: bool | None
    allow_openai: bool | None
    openai_api_key_file: str | None
    openai_cors_origins: str | Sequence[str] | None
    http_header_timeout_secs: float | None
    http_body_timeout_secs: float | None
    http_idle_timeout_secs: float | None
    http_use_ssl: bool | None
    http_use_ssl_mutual: bool | None
    http_server_cert: str | None
    http_server_key: str | None
    http_root_cert: str | None
    allow_grpc: bool | None
    grpc_address: str | None
    grpc_port: int | None
    reuse_grpc_port: bool | None
    grpc_reflection: bool | None
    grpc_header_forward_pattern: str | None
    grpc_restricted_protocol: str | Sequence[str] | None
    grpc_infer_thread_count: int | None
    grpc_infer_allocation_pool_size: int | None
    grpc_max_response_pool_size: int | None
    grpc_use_ssl: bool | None
    grpc_use_ssl_mutual: bool | None
    grpc_server_cert: str | None
    grpc_server_key: str | None
    grpc_root_cert: str | None
    grpc_infer_response_compression_level: str | None
    grpc_keepalive_time: int | None
    grpc_keepalive_timeout: int | None
    grpc_keepalive_permit_without_calls: bool | None
    grpc_http2_max_pings_without_data: int | None
    grpc_http2_min_recv_ping_interval_without_data: int | None
    grpc_http2_max_ping_strikes: int | None
    grpc_max_connection_age: int | None
    grpc_max_connection_age_grace: int | None
    grpc_handshake_timeout_secs: float | None
    grpc_body_timeout_secs: float | None
    allow_metrics: bool | None
    allow_gpu_metrics: bool | None
    allow_cpu_metrics: bool | None
    metrics_address: str | None
    metrics_port: int | None
    metrics_interval_ms: int | None
    metrics_config: str | Sequence[str] | None
    trace_config: str | Sequence[str] | None
    backend_directory: str | None
    backend_config: str | Sequence[str] | None
    repoagent_directory: str | None
    cache_config: str | Sequence[str] | None
    cache_directory: str | None
    rate_limit: str | None
    rate_limit_resource: str | Sequence[str] | None
    allow_client_shm: bool | None
    pinned_memory_pool_byte_size: int | str | None
    cuda_memory_pool_byte_size: str | Sequence[str] | None
    cuda_virtual_address_size: str | Sequence[str] | None
    min_supported_compute_capability: float | None
    buffer_manager_thread_count: int | None
    host_policy: str | Sequence[str] | None
    model_load_gpu_limit: str | Sequence[str] | None
    sagemaker_port: int | None
    sagemaker_thread_count: int | None
    vertex_ai_port: int | None
    vertex_ai_thread_count: int | None
    arena_byte_size: int | str | None
    grpc_engine: str | None
    frontend_processes: str | None
    stub_start: str | None
    busy_poll: bool | None
    environment_cache_dir: str | None
    environment_timeout_secs: float | None
    debug_model: str | None
    crash_records: int | None
    crash_directory: str | None
    crash_tensor_byte_size: int | str | None
    quarantine_secs: float | None
    stub_load_timeout_secs: float | None
    stub_grace_secs: float | None
    response_send_timeout_secs: float | None
