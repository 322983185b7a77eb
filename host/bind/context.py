"""The model that a function is called for, as decorators and the function itself can ask."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from host.bind.specs import ModelConfig, ModelSpec, TensorSpec, with_default_names

_current: contextvars.ContextVar[ModelSpec | None] = contextvars.ContextVar(
    "pbhost_bound_model", default=None
)


def current_model() -> ModelSpec | None:
    """The model that is called here; None in a test that calls the function itself."""
    return _current.get()


@contextmanager
def model_context(model: ModelSpec) -> Iterator[None]:
    """Within the block, functions are called for this model."""
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
    """For tests: within the block, decorators see such a model, without a host.

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
