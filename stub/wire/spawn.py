"""The arguments of a stub process, and of processes that are started like one."""

import json
from dataclasses import asdict, dataclass
from typing import ClassVar, Tuple, Type, TypeVar

NO_THREADS_STATUS = 75  # EX_TEMPFAIL
"""Exit status of a stub that cannot start its threads."""

_Arguments = TypeVar("_Arguments", bound="ProcessArguments")


@dataclass(frozen=True)
class ProcessArguments:
    """What a new process gets as JSON in its only command-line argument.

    It inherits the descriptors in the fields `DESCRIPTORS`; -1 is none.
    """

    DESCRIPTORS: ClassVar[Tuple[str, ...]] = ()

    @property
    def descriptors(self) -> Tuple[int, ...]:
        """The descriptors that the process inherits."""
        known: Tuple[int, ...] = tuple(getattr(self, name) for name in self.DESCRIPTORS)
        return tuple(descriptor for descriptor in known if descriptor >= 0)

    def dump(self) -> str:
        """Returns the command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls: Type[_Arguments], text: str) -> _Arguments:
        """Parses the command-line argument."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class SpawnArguments(ProcessArguments):
    """The arguments of a new stub.

    Limits are in bytes. `lifeline_fd` is closed when the host ends. `rings_fd` holds the ring of
    work to the stub, the ring to the host, and the ring of BLS responses to the stub; the eventfds
    count their records. With `report_imports`, the stub sends `ImportedFiles`.
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
