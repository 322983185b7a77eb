"""Filling in the values that a configuration may leave out."""

from __future__ import annotations

from host.config.schema import ConfigPart, ModelConfig, is_ensemble

_DEFAULT_IDLE_US = 1_000_000


def normalise_config(config: ModelConfig) -> None:
    """Fill in version policy, schedulers and pinned memory (configuration spec 2.5)."""
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    if config.HasField("dynamic_batching"):
        _prefer_full_batches(config.dynamic_batching, config.max_batch_size)
    if config.HasField("sequence_batching"):
        batcher = config.sequence_batching
        if batcher.HasField("oldest"):
            _prefer_full_batches(batcher.oldest, config.max_batch_size)
        if batcher.max_sequence_idle_microseconds == 0:
            batcher.max_sequence_idle_microseconds = _DEFAULT_IDLE_US
    if not is_ensemble(config):
        for name in ("input_pinned_memory", "output_pinned_memory"):
            if not config.optimization.HasField(name):
                getattr(config.optimization, name).enable = True


def _prefer_full_batches(batcher: ConfigPart, max_batch_size: int) -> None:
    if not batcher.preferred_batch_size and max_batch_size > 0:
        batcher.preferred_batch_size.append(max_batch_size)
