"""The states of a stub, and the messages that are allowed in each; both ends use this table.

The table does not depend on the end: each end passes it every message, sent or received.
"""

import enum
from typing import Dict, Iterable, Type, Union

from stub.wire import messages as m


class ProtocolError(Exception):
    """A message is not allowed in the present state; the session cannot continue."""


class State(enum.Enum):
    """The states of a stub process."""

    __hash__ = object.__hash__  # faster than that of Enum, and each message needs it

    CONNECTING = "connecting"
    IDLE = "idle"
    AUTO_COMPLETING = "auto-completing"
    AUTO_COMPLETED = "auto-completed"
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
"""Calls that a model may make from `initialize` on, besides sending responses."""

_FROM_SERVING_STUB = (
    *_HOST_CALLS,
    m.Response,
    m.InstanceReleased,
    m.BatchReturned,
    m.BatchDone,
    m.BlsRequest,
    m.CancelBls,
    m.ReadinessResult,
)

_TO_SERVING_STUB = (
    m.BlsResponse,
    m.CancelRequest,
    m.ResponseAck,
    m.HostReply,
    m.CheckReady,
    m.SequencesExpired,
)
"""These may be sent before the stub's last message has arrived."""


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
    # Messages about running work may cross with the Finalize message.
    State.FINALIZING: {
        **_keep_state(State.FINALIZING, _FROM_SERVING_STUB, _TO_SERVING_STUB),
        m.Finalized: State.ENDED,
    },
    State.ENDED: _keep_state(State.ENDED, _TO_SERVING_STUB),
    State.ERROR: {},
}

ALWAYS_ALLOWED = (
    m.LogLine,
    m.ModelWarning,
    m.ImportedFiles,
    m.BlockRelease,
    m.OpenArena,
    m.CloseArena,
    m.DescribeStacks,
    m.Stacks,
)
"""Allowed in every state but ERROR, because they concern the process and not the model."""


class Session:
    """The state of a stub as one end sees it."""

    def __init__(self) -> None:
        self.state = State.CONNECTING

    def advance(self, message: Union[m.ToStub, m.ToHost]) -> None:
        """Moves to the next state after a message was sent or received.

        Raises ProtocolError if the message is not allowed; the session then stays in ERROR.
        """
        kind = type(message)
        following = TRANSITIONS[self.state].get(kind)
        if following is not None:
            self.state = following
        elif kind not in ALWAYS_ALLOWED or self.state is State.ERROR:
            state, self.state = self.state, State.ERROR
            raise ProtocolError(f"{kind.__name__} is not allowed while {state.value}")
