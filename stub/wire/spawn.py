"""What a stub is started with."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Spawn:
    """What the host passes to a new stub, as JSON in its only argument.

    Descriptors are inherited; limits are in bytes; `lifeline_fd` ends when the host does.
    """

    endpoint: str
    token: str
    title: str
    lifeline_fd: int
    arena: int
    arena_fd: int
    arena_limit: int
    host_arena_fd: int
    host_arena_limit: int

    def dump(self) -> str:
        """As an argument."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> "Spawn":
        """From an argument."""
        return cls(**json.loads(text))
