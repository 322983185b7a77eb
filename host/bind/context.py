"""The current model: the model whose bound function is running."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from host.bind.specs import ModelConfig, ModelSpec, TensorSpec, with_default_names

_current: contextvars.ContextVar[ModelSpec | None] = contextvars.ContextVar(
    "pbhost_bound_model", default=None
)


def current_model() -> ModelSpec | None:
    """Returns the current model; None in a test that calls the function directly."""
    return _current.get()


@contextmanager
def model_context(model: ModelSpec) -> Iterator[None]:
    """Makes this model the current one inside the block."""
    token = _current.set(model)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def bound_as(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    config: ModelConfig | None = None,
    *,
    name: str = "test",
) -> Iterator[ModelSpec]:
    """For tests: makes a model with these tensors the current one, without a host.

    Raises BadSpecError.
    """
    model = ModelSpec(
        name,
        with_default_names(inputs, "INPUT"),
        with_default_names(outputs, "OUTPUT"),
        config or ModelConfig(),
    )
    with model_context(model):
        yield model
