"""Error texts about models that the host, stubs and the test harness share, and their limit."""

from __future__ import annotations

BLS_NOT_ALLOWED = "BLS is only supported during the 'execute' function."
IS_READY_NO_BOOL = "is_ready() must return a boolean value"
LABEL_NO_TEXT = "attempt to access JSON non-string as string"
KIND_DIFFERS = "Family name already exists with different type"
BUCKETS_NOT_SORTED = "Bucket Boundaries must be strictly sorted"
METRIC_DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The"
    " 'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been"
    " deleted."
)
COUNTER_DECREMENT = (
    "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
)
NOT_RESCHEDULED = (
    "Failed to release request: Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,"
    " while the model is not configured to handle such a flag."
)

MAX_TEXT_CHARACTERS = 65536
"""Characters of a text that are kept."""


def limit_text(text: str) -> str:
    """Returns the text, cut to MAX_TEXT_CHARACTERS; then its end says how much is cut."""
    cut = len(text) - MAX_TEXT_CHARACTERS
    return text if cut <= 0 else f"{text[:MAX_TEXT_CHARACTERS]}... ({cut} more characters)"


def no_python_file(file: str) -> str:
    """The model's file is no Python file."""
    return f"Model name must end with '.py'. Model name is \"{file}\"."


def missing_file(path: object) -> str:
    """The model's file does not exist."""
    return f"Python model file not found in '{path}'"


def no_model_config(model: str) -> str:
    """``auto_complete_config`` returned something else than a ``ModelConfig``."""
    return (
        f"auto_complete_config function in model '{model}' must return a valid pb.ModelConfig"
        " object."
    )


def failed_batch(instance: str, text: str) -> str:
    """The error of all requests of a batch."""
    return f"Failed to process the request(s) for model '{instance}', message: {text}"


def failed_call(instance: str, text: str) -> str:
    """The error of a call of the API that the host has refused."""
    return f"Failed to process the request for model '{instance}', message: {text}"


def failed_bls(model: str, text: str) -> str:
    """The error of a request to another model that could not be run."""
    return f"Model {model} - Error when running inference: {text}"


def not_ready_for_bls(model: str) -> str:
    """A model that another one calls is not ready."""
    return f"Failed for execute the inference request. Model '{model}' is not ready."


def decoupled_needed_for_bls(model: str) -> str:
    """A decoupled model was called without ``decoupled=True``."""
    return (
        f"Model {model} is using the decoupled. The current BLS request call doesn't support models"
        " using the decoupled transaction policy. Please use 'decoupled=True' argument to the"
        " 'exec' or 'async_exec' calls for decoupled models.'"
    )


def unknown_model(model: str, problem: str) -> str:
    """A model is not found, or none of its versions is."""
    return f"Request for unknown model: '{model}' {problem}"


def failed_load(model: str) -> str:
    """The repository has no usable model of this name."""
    return f"failed to load '{model}', failed to poll from model repository"


def invalid_version(text: str, details: str = "") -> str:
    """A version is not a number, or is out of range."""
    return (
        f"failed to get model version from specified version string '{text}'{details}, version"
        " should be an integral value > 0"
    )


def invalid_metric_name(kind: str, name: str, pattern: str) -> str:
    """The name of a metric or of a label does not match its pattern."""
    return f"Invalid {kind} name '{name}'; it must match {pattern} and not begin with '__'"
