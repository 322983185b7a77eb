"""What a stub is started with."""

import json
from dataclasses import asdict, dataclass
from typing import ClassVar, Tuple


@dataclass(frozen=True)
class SpawnArguments:
    """What the host passes to a new stub, as JSON in its only argument.

    Descriptors are inherited; limits are in bytes. `lifeline_fd` ends when the host does.
    `rings_fd` holds the ring towards the stub, then the one towards the host; the eventfds count
    the frames in them.
    """

    endpoint: str
    token: str
    process_title: str
    lifeline_fd: int
    rings_fd: int
    work_event_fd: int
    host_event_fd: int
    arena: int
    arena_fd: int
    arena_limit: int
    host_arena_fd: int
    host_arena_limit: int

    DESCRIPTORS: ClassVar[Tuple[str, ...]] = (
        "lifeline_fd",
        "rings_fd",
        "work_event_fd",
        "host_event_fd",
        "arena_fd",
        "host_arena_fd",
    )

    @property
    def descriptors(self) -> Tuple[int, ...]:
        """Those that the stub inherits."""
        return tuple(getattr(self, name) for name in self.DESCRIPTORS)

    def dump(self) -> str:
        """As an argument."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> "SpawnArguments":
        """From an argument."""
        return cls(**json.loads(text))
