"""Validates configurations, with the checks in the order of the reference documentation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from host.config.defaults import PLATFORMS_OF_BACKEND
from host.config.findings import Finding, Findings
from host.config.load_parameters import check_load_parameters
from host.config.openai_parameters import check_openai_parameters
from host.config.parameters import (
    check_input_memory,
    check_max_concurrent_batches,
    check_preserves_ordering,
)
from host.config.schema import ENSEMBLE, ModelConfig
from host.config.traffic_parameters import check_traffic_parameters
from host.config.validate_ensemble import check_ensemble
from host.config.validate_schedulers import check_dynamic_batching, check_sequence_batching
from host.config.validate_tensors import check_batch_tensors, check_inputs, check_outputs
from host.errors import ErrorCode

_log = logging.getLogger("pbhost")

_CUSTOMISABLE_FAMILY = "nv_inference_first_response_histogram_ms"


def check_config(config: ModelConfig) -> Findings:
    """Checks everything except the tensors (docs/reference/configuration-and-scheduling.md, "Checks
    of a configuration").
    """
    return chain(
        _check_identity(config),
        check_dynamic_batching(config),
        check_sequence_batching(config),
        check_ensemble(config),
        _check_response_cache(config),
        _check_metrics(config),
        check_max_concurrent_batches(config),
        check_preserves_ordering(config),
        check_load_parameters(config),
        check_traffic_parameters(config),
        check_openai_parameters(config),
    )


def check_tensors(config: ModelConfig) -> Findings:
    """Checks the inputs, outputs and batch tensors
    (docs/reference/configuration-and-scheduling.md, "Checks of tensors").
    """
    findings = chain(check_inputs(config), check_outputs(config), check_batch_tensors(config))
    suffix = f" for {config.name}"
    return (found._replace(text=found.text + suffix) for found in findings)


def _check_identity(config: ModelConfig) -> Findings:
    name, platform, backend = config.name, config.platform, config.backend
    if not name:
        yield Finding("model configuration must specify 'name'", "name")
    if not backend and platform != ENSEMBLE:
        advice = 'set the backend, for example backend: "python"'
        text = f"unexpected platform type '{platform}' for {name}"
        yield Finding(text, "platform", advice=advice)
    if backend and platform == ENSEMBLE:
        yield Finding(
            f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type",
            "backend",
        )
    if platform not in PLATFORMS_OF_BACKEND.get(backend, {platform}):
        yield Finding(
            f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}", "platform"
        )
    if config.max_batch_size < 0:
        yield Finding(f"'max_batch_size' must be non-negative value for {name}", "max_batch_size")


def _check_response_cache(config: ModelConfig) -> Findings:
    if config.response_cache.enable and config.model_transaction_policy.decoupled:
        yield Finding(
            f"Response Cache does not currently support model {config.name} with 'decoupled' "
            "transaction policy. Please disable the response cache.",
            "response_cache.enable",
        )


def _check_metrics(config: ModelConfig) -> Findings:
    for index, control in enumerate(config.model_metrics.metric_control):
        path = f"model_metrics.metric_control[{index}]"
        identifier, family = f"{path}.metric_identifier", control.metric_identifier.family
        if not control.HasField("metric_identifier"):
            yield Finding("metric control must specify 'metric_identifier'", identifier)
        if not family:
            yield Finding(
                "metric identifier must specify non-empty 'family'", f"{identifier}.family"
            )
        if not control.HasField("histogram_options"):
            yield Finding(
                "metric control must specify 'histogram_options'", f"{path}.histogram_options"
            )
        if not control.histogram_options.buckets:
            yield Finding(
                "histogram options must specify non-empty 'buckets'",
                f"{path}.histogram_options.buckets",
            )
        if family != _CUSTOMISABLE_FAMILY:
            _log.warning(
                "Metric family '%s' in 'metric_identifier' is not a customizable metric in "
                "Triton core.",
                family,
            )


_STRATEGY = "TRITON_BATCH_STRATEGY_PATH"


@dataclass(frozen=True, slots=True)
class _Unsupported:
    """An unsupported field. `requested` tells whether a configuration uses it."""

    field: str
    reason: str
    requested: Callable[[ModelConfig], bool]


_UNSUPPORTED = (
    _Unsupported(
        f"parameters[{_STRATEGY}]",
        "batching strategies from shared libraries are not supported",
        lambda config: _STRATEGY in config.parameters,
    ),
    _Unsupported(
        "batch_output",
        "the responses of a decoupled model do not form a batch",
        lambda config: bool(config.batch_output and config.model_transaction_policy.decoupled),
    ),
)


def check_supported(config: ModelConfig) -> Findings:
    """Checks that the configuration uses only supported features."""
    yield from check_input_memory(config)
    for unsupported in _UNSUPPORTED:
        if unsupported.requested(config):
            yield Finding(
                f"model '{config.name}' cannot be loaded: {unsupported.reason}, "
                f"remove '{unsupported.field}' from its configuration",
                unsupported.field,
                ErrorCode.UNSUPPORTED,
            )
