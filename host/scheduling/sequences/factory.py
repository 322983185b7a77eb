"""Makes the sequence scheduler of a configuration.

Source: docs/reference/configuration-and-scheduling.md, "Direct strategy" and "Oldest strategy".
"""

from __future__ import annotations

from host.config.schema import ModelConfig
from host.scheduling.clock import Clock, LoopClock
from host.scheduling.dynamic import CanShareBatch, DynamicScheduler, hold_from_environment
from host.scheduling.sequences.controls import ControlTensors
from host.scheduling.sequences.direct_strategy import DirectStrategy
from host.scheduling.sequences.oldest_strategy import OldestStrategy
from host.scheduling.sequences.scheduler import (
    SequenceOptions,
    SequenceScheduler,
    backlog_hold_from_environment,
)
from host.scheduling.sequences.states import SequenceStates


def sequence_scheduler(
    config: ModelConfig,
    compatible: CanShareBatch,
    states: SequenceStates | None = None,
    clock: Clock | None = None,
) -> SequenceScheduler:
    """The scheduler for `sequence_batching`. Raises HostError.

    TRITONSERVER_DELAY_SCHEDULER counts requests in slots with the direct strategy, and requests in
    each instance's batcher with the oldest strategy.
    """
    clock = LoopClock() if clock is None else clock
    batcher = config.sequence_batching
    slots = max(1, config.max_batch_size)
    hold = hold_from_environment()
    strategy: DirectStrategy | OldestStrategy
    if batcher.HasField("oldest"):
        oldest, inner_hold, hold = batcher.oldest, hold, 0
        slots = oldest.max_candidate_sequences if oldest.max_candidate_sequences > 0 else slots
        strategy = OldestStrategy(
            lambda: DynamicScheduler(
                config.max_batch_size,
                oldest.max_queue_delay_microseconds / 1e6,
                compatible,
                preferred=oldest.preferred_batch_size,
                keep_order=oldest.preserve_ordering,
                hold=inner_hold,
                clock=clock,
            )
        )
    else:
        direct = batcher.direct
        delay = direct.max_queue_delay_microseconds * 1000
        strategy = DirectStrategy(compatible, direct.minimum_slot_utilization, delay)
    shape = SequenceOptions(
        model=config.name,
        slots=slots,
        idle=batcher.max_sequence_idle_microseconds * 1000,
        strategy=strategy,
        controls=ControlTensors(batcher, config.max_batch_size > 0),
        iterative=batcher.iterative_sequence,
        outputs=tuple(output.name for output in config.output),
        states=states,
        hold=hold,
        backlog_hold=backlog_hold_from_environment() if isinstance(strategy, DirectStrategy) else 0,
    )
    return SequenceScheduler(shape, clock)
