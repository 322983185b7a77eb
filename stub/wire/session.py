"""Who may say what, when: the table of legal moves that both ends obey.

The table does not know which end it serves; each end tells it every message, sent or received.
"""

import enum
from typing import Dict, Iterable, Type, Union

from stub.wire import messages as m


class ProtocolError(Exception):
    """A message came at a moment when it means nothing. That side's session is over."""


class State(enum.Enum):
    """The life of a stub process as both ends see it."""

    __hash__ = object.__hash__  # that of Enum is a Python function, and each message needs it

    CONNECTING = "connecting"
    IDLE = "idle"
    AUTO_COMPLETING = "describing"
    AUTO_COMPLETED = "described"
    INITIALIZING = "initializing"
    SERVING = "serving"
    FINALIZING = "finalizing"
    ENDED = "ended"
    ERROR = "error"


_HOST_CALLS = (
    m.LoadModel,
    m.UnloadModel,
    m.IsModelReady,
    m.NewMetricFamily,
    m.NewMetric,
    m.ChangeMetric,
    m.ReadMetric,
    m.DropMetrics,
)
"""What a model may ask for besides answering, from `initialize` on."""

_FROM_SERVING_STUB = (
    *_HOST_CALLS,
    m.Response,
    m.InstanceReleased,
    m.BatchDone,
    m.BlsRequest,
    m.CancelBls,
    m.ReadinessResult,
)

_TO_SERVING_STUB = (m.BlsResponse, m.CancelRequest, m.ResponseAck, m.HostReply, m.CheckReady)
"""These may cross the stub's last words on their way."""


def _keep_state(state: State, *messages: Iterable[Type[object]]) -> Dict[Type[object], State]:
    return {kind: state for kinds in messages for kind in kinds}


TRANSITIONS: Dict[State, Dict[Type[object], State]] = {
    State.CONNECTING: {m.Hello: State.IDLE},
    State.IDLE: {
        m.AutoComplete: State.AUTO_COMPLETING,
        m.Initialize: State.INITIALIZING,
        m.Finalize: State.FINALIZING,
    },
    State.AUTO_COMPLETING: {m.AutoCompleted: State.AUTO_COMPLETED, m.LoadFailed: State.ENDED},
    State.AUTO_COMPLETED: {m.Initialize: State.INITIALIZING, m.Finalize: State.FINALIZING},
    State.INITIALIZING: {
        **_keep_state(State.INITIALIZING, _HOST_CALLS, (m.HostReply,)),
        m.Initialized: State.SERVING,
        m.LoadFailed: State.ENDED,
    },
    State.SERVING: {
        **_keep_state(State.SERVING, _FROM_SERVING_STUB, _TO_SERVING_STUB, (m.Execute,)),
        m.Finalize: State.FINALIZING,
    },
    # Work that was under way when the stub was told to leave may still cross it on the wire.
    State.FINALIZING: {
        **_keep_state(State.FINALIZING, _FROM_SERVING_STUB, _TO_SERVING_STUB),
        m.Finalized: State.ENDED,
    },
    State.ENDED: _keep_state(State.ENDED, _TO_SERVING_STUB),
    State.ERROR: {},
}

ALWAYS_ALLOWED = (m.LogLine, m.BlockRelease, m.OpenArena, m.CloseArena)
"""Legal in every state but ERROR: they concern the process, not its life."""


class Session:
    """One end's view of the conversation."""

    def __init__(self) -> None:
        self.state = State.CONNECTING

    def advance(self, message: Union[m.ToStub, m.ToHost]) -> None:
        """Take note of a message that was sent or received.

        Raises ProtocolError if the table does not allow it; the session is then in ERROR for good.
        """
        kind = type(message)
        following = TRANSITIONS[self.state].get(kind)
        if following is not None:
            self.state = following
        elif kind not in ALWAYS_ALLOWED or self.state is State.ERROR:
            state, self.state = self.state, State.ERROR
            raise ProtocolError(f"{kind.__name__} is not allowed while {state.value}")
