"""Adds up the statistics of several servers with the same models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

from host.inference.metadata import (
    BatchStatistics,
    Duration,
    InferenceStatistics,
    ModelStatistics,
)

_Durations = TypeVar("_Durations", InferenceStatistics, BatchStatistics)


def add_statistics(servers: Iterable[Iterable[ModelStatistics]]) -> list[ModelStatistics]:
    """The sum over servers, for each version of each model; the last inference is the latest."""
    sums: dict[tuple[str, str], ModelStatistics] = {}
    for models in servers:
        for model in models:
            known = sums.get((model.name, model.version))
            sums[model.name, model.version] = model if known is None else _add(known, model)
    return list(sums.values())


def _add(left: ModelStatistics, right: ModelStatistics) -> ModelStatistics:
    batches = {batch.batch_size: batch for batch in left.batch_stats}
    for batch in right.batch_stats:
        known = batches.get(batch.batch_size)
        batches[batch.batch_size] = batch if known is None else _add_durations(known, batch)
    return ModelStatistics(
        left.name,
        left.version,
        max(left.last_inference, right.last_inference),
        left.inference_count + right.inference_count,
        left.execution_count + right.execution_count,
        _add_durations(left.inference_stats, right.inference_stats),
        [batches[size] for size in sorted(batches)],
    )


def _add_durations(left: _Durations, right: _Durations) -> _Durations:
    changes: dict[str, Any] = {}
    for field in fields(left):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, Duration):
            changes[field.name] = Duration(one.count + other.count, one.ns + other.ns)
    return replace(left, **changes)
