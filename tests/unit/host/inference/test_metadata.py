"""Metadata and statistics of the server and its models, which frontends translate."""

from __future__ import annotations

from host.inference.metadata import (
    BatchStatistics,
    Duration,
    InferenceStatistics,
    ModelStatistics,
    add_statistics,
)


def statistics(name: str, count: int, *sizes: int) -> ModelStatistics:
    return ModelStatistics(
        name,
        "1",
        last_inference=count,
        inference_count=count,
        execution_count=count,
        inference_stats=InferenceStatistics(success=Duration(count, 10 * count)),
        batch_stats=[BatchStatistics(size, Duration(1, 5)) for size in sizes],
    )


def test_counts_and_times_are_added_and_the_last_inference_is_the_latest() -> None:
    assert add_statistics([[statistics("a", 2)], [statistics("a", 3)], []]) == [
        ModelStatistics(
            "a", "1", 3, 5, 5, InferenceStatistics(success=Duration(5, 50)), batch_stats=[]
        )
    ]


def test_batches_are_added_by_size_and_models_apart() -> None:
    first, second = add_statistics(
        [[statistics("a", 1, 1, 4), statistics("b", 1)], [statistics("a", 1, 2, 4)]]
    )
    assert [(batch.batch_size, batch.compute_input) for batch in first.batch_stats] == [
        (1, Duration(1, 5)),
        (2, Duration(1, 5)),
        (4, Duration(2, 10)),
    ]
    assert second == statistics("b", 1)
