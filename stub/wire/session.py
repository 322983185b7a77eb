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
    DESCRIBING = "describing"
    DESCRIBED = "described"
    INITIALIZING = "initializing"
    SERVING = "serving"
    FINALIZING = "finalizing"
    ENDED = "ended"
    ERROR = "error"


_INITIALIZING = (
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

_WORKING = (
    *_INITIALIZING,
    m.Respond,
    m.Released,
    m.BatchDone,
    m.Ask,
    m.Withdraw,
    m.Checked,
)

_TO_THE_STUB = (m.Answer, m.Cancelled, m.Taken, m.Told, m.CheckReady)
"""These may cross the stub's last words on their way."""


def _stay(state: State, *messages: Iterable[Type[object]]) -> Dict[Type[object], State]:
    return {kind: state for kinds in messages for kind in kinds}


MOVES: Dict[State, Dict[Type[object], State]] = {
    State.CONNECTING: {m.Hello: State.IDLE},
    State.IDLE: {
        m.Describe: State.DESCRIBING,
        m.Initialize: State.INITIALIZING,
        m.Finalize: State.FINALIZING,
    },
    State.DESCRIBING: {m.Described: State.DESCRIBED, m.LoadFailed: State.ENDED},
    State.DESCRIBED: {m.Initialize: State.INITIALIZING, m.Finalize: State.FINALIZING},
    State.INITIALIZING: {
        **_stay(State.INITIALIZING, _INITIALIZING, (m.Told,)),
        m.Initialized: State.SERVING,
        m.LoadFailed: State.ENDED,
    },
    State.SERVING: {
        **_stay(State.SERVING, _WORKING, _TO_THE_STUB, (m.Execute,)),
        m.Finalize: State.FINALIZING,
    },
    # Work that was under way when the stub was told to leave may still cross it on the wire.
    State.FINALIZING: {
        **_stay(State.FINALIZING, _WORKING, _TO_THE_STUB),
        m.Finalized: State.ENDED,
    },
    State.ENDED: _stay(State.ENDED, _TO_THE_STUB),
    State.ERROR: {},
}

ALWAYS = (m.LogLine, m.Return, m.OpenArena, m.CloseArena)
"""Legal in every state but ERROR: they concern the process, not its life."""


class Session:
    """One end's view of the conversation."""

    def __init__(self) -> None:
        self.state = State.CONNECTING

    def step(self, message: Union[m.ToStub, m.ToHost]) -> None:
        """Take note of a message that was sent or received.

        Raises ProtocolError if the table does not allow it; the session is then in ERROR for good.
        """
        kind = type(message)
        following = MOVES[self.state].get(kind)
        if following is not None:
            self.state = following
        elif kind not in ALWAYS or self.state is State.ERROR:
            state, self.state = self.state, State.ERROR
            raise ProtocolError(f"{kind.__name__} is not allowed while {state.value}")
