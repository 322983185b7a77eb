"""What a frontend process inherits: its number, and descriptors."""

from __future__ import annotations

import msgspec


class FrontendSpawn(msgspec.Struct):
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

    @property
    def descriptors(self) -> list[int]:
        """The inherited descriptors."""
        known = (
            self.control,
            self.rings,
            self.to_frontend,
            self.to_core,
            self.arena_fd,
            self.host_arena_fd,
            self.grpc,
            self.http,
            self.budget,
        )
        return [descriptor for descriptor in known if descriptor >= 0]

    def dump(self) -> str:
        """As an argument of a command."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def load(cls, argument: str) -> FrontendSpawn:
        """Reads what `dump` has written."""
        return msgspec.json.decode(argument, type=cls)
