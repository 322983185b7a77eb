"""The arguments of a stub process."""

import json
from dataclasses import asdict, dataclass
from typing import ClassVar, Tuple

NO_THREADS_STATUS = 75  # EX_TEMPFAIL
"""Exit status of a stub that cannot start its threads."""


@dataclass(frozen=True)
class SpawnArguments:
    """The arguments of a new stub, passed as JSON in its only command-line argument.

    The stub inherits the descriptors; limits are in bytes. `lifeline_fd` is closed when the host
    ends. `rings_fd` holds the ring of work to the stub, the ring to the host, and the ring of BLS
    responses to the stub; the eventfds count their frames. With `report_imports`, the stub sends
    `ImportedFiles`.
    """

    endpoint: str
    token: str
    process_title: str
    lifeline_fd: int
    rings_fd: int
    work_event_fd: int
    host_event_fd: int
    bls_event_fd: int
    arena: int
    arena_fd: int
    arena_limit: int
    host_arena_fd: int
    host_arena_limit: int
    report_imports: bool = False

    DESCRIPTORS: ClassVar[Tuple[str, ...]] = (
        "lifeline_fd",
        "rings_fd",
        "work_event_fd",
        "host_event_fd",
        "bls_event_fd",
        "arena_fd",
        "host_arena_fd",
    )

    @property
    def descriptors(self) -> Tuple[int, ...]:
        """The descriptors that the stub inherits."""
        return tuple(getattr(self, name) for name in self.DESCRIPTORS)

    def dump(self) -> str:
        """Returns the command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> "SpawnArguments":
        """Parses the command-line argument."""
        return cls(**json.loads(text))
