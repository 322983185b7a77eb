"""What a frontend process inherits: its number, and descriptors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stub.wire.spawn import ProcessArguments


@dataclass(frozen=True)
class FrontendSpawn(ProcessArguments):
    """The arguments of a frontend process. Descriptors are numbers in that process.

    `index`: 0, 1, ... `control`: the socket that brings arenas, and shows the end of the core.
    `rings`, and the eventfds `to_frontend` and `to_core`: of the `RingFiles`. `limit`: bytes of an
    arena. `grpc`, `http`: listening sockets; -1 for none. `budget`, `budget_size`: of a
    `BudgetFile`.
    """

    index: int
    control: int
    rings: int
    to_frontend: int
    to_core: int
    arena: int
    arena_fd: int
    limit: int
    host_arena_fd: int
    grpc: int
    http: int
    budget: int
    budget_size: int

    DESCRIPTORS: ClassVar[tuple[str, ...]] = (
        "control",
        "rings",
        "to_frontend",
        "to_core",
        "arena_fd",
        "host_arena_fd",
        "grpc",
        "http",
        "budget",
    )
