"""Finds BLS calls that could only go on after themselves, and fails one of each circle."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from host.errors import internal
from host.inference.request import Call
from host.scheduling.clock import Clock, LoopClock, Timer
from host.scheduling.ordering import OrderedCall

_LOOK_NS = 1_000_000_000
"""How often open calls are looked at again: a circle may close long after they were made."""

_Ways = list[list[list[object]]]
"""What keeps something from going on: in one of these ways, each list has something stuck."""


class CircleWatch:
    """Looks at BLS calls when they are made, and about once a second as long as they are open."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = LoopClock() if clock is None else clock
        self._timer: Timer | None = None
        self._open: dict[Call, None] = {}  # the newest last; some have ended
        self._tidy_at = 64
        self._old: Collection[Call] = ()  # were open already when all were looked at

    def add(self, call: Call) -> None:
        """Fail the call if it closes a circle; otherwise keep an eye on it."""
        if not _goes_on(call):
            graph = _Graph([call], ())
            if graph.goes_in_a_circle(call):
                _fail(call, graph.held_up(call))
                return
        self._open[call] = None
        if len(self._open) >= self._tidy_at:
            self._tidy()
        if self._timer is None:
            self._timer = self._clock.call_later(_LOOK_NS, self._look)

    def _tidy(self) -> None:
        self._open = {call: None for call in self._open if not call.finished}
        self._tidy_at = max(64, 2 * len(self._open))

    def _look(self) -> None:
        """Fail the newest call of every circle. One failure may free what hung on it."""
        self._timer = None
        self._tidy()
        graph = _Graph(self._open, self._old)
        for call in reversed(list(self._open)):
            if not graph.stuck:
                break
            if graph.goes_in_a_circle(call):
                _fail(call, graph.held_up(call))
                graph = _Graph(self._open, self._old)
        self._tidy()
        self._old = set(self._open)
        if self._open:
            self._timer = self._clock.call_later(_LOOK_NS, self._look)


class _Graph:
    """Calls, queues and lanes that can be reached from some calls, and which of them are stuck.

    A call is stuck if no event but a failure can ever let it end. A queued one is if every lane of
    its model is, and none is on its way back; a lane, if the batch on it waits for a stuck call;
    and whatever may not respond before a stuck call. What a batch only may wait for counts if it is
    among the calls `old`.
    """

    def __init__(self, calls: Iterable[Call], old: Collection[Call]) -> None:
        self._ways: dict[int, _Ways] = {}
        todo: list[object] = list(calls)
        while todo:
            node = todo.pop()
            if id(node) not in self._ways:
                ways = self._ways[id(node)] = _ways(node, old)
                todo += (other for way in ways for group in way for other in group)
        self.stuck = set(self._ways)
        self._remove_what_goes_on()

    def _remove_what_goes_on(self) -> None:
        stuck = self.stuck
        before = len(stuck) + 1
        while len(stuck) < before:
            before = len(stuck)
            for node in reversed(self._ways):  # the last ones found first: chains end there
                if node in stuck and not any(
                    way and all(any(id(other) in stuck for other in group) for group in way)
                    for way in self._ways[node]
                ):
                    stuck.discard(node)

    def goes_in_a_circle(self, call: Call) -> bool:
        """Whether the call is stuck, and is itself among what it waits for."""
        seen: set[int] = set()
        todo = [id(call)] if id(call) in self.stuck else []
        while todo:
            for way in self._ways[todo.pop()]:
                for group in way:
                    found = {id(other) for other in group} & self.stuck - seen
                    if id(call) in found:
                        return True
                    seen |= found
                    todo += found
        return False

    def held_up(self, call: Call) -> Call:
        """The call itself; of one to an ensemble, that to the member that it is stuck at."""
        seen: set[int] = set()
        todo: list[object] = [call]
        while todo:
            node = todo.pop()
            if id(node) in seen or id(node) not in self.stuck or not isinstance(node, Call):
                continue
            seen.add(id(node))
            place = node.holder
            if hasattr(place, "lanes") or getattr(node, "behind", None) is not None:
                return node
            todo += getattr(place, "waiting_for", ())
        return call


def _goes_on(call: Call) -> bool:
    """Whether the call runs, or a lane will be free for it, without a wait for any other call.

    That nearly always is so, and is told for a fraction of what a graph takes.
    """
    if isinstance(call, OrderedCall) and call.behind is not None:
        return False
    place = call.holder
    return any(
        not any(getattr(lane, name, ()) for name in ("held_up_by", "waiting_for", "lanes"))
        for lane in getattr(place, "lanes", (place,))
    )


def _ways(node: object, old: Collection[Call]) -> _Ways:
    if isinstance(node, Call):
        if node.finished:
            return []
        behind = node.behind if isinstance(node, OrderedCall) else None
        return [[[other for other in (node.holder, behind) if other is not None]]]
    lanes: Sequence[object] | None = getattr(node, "lanes", None)
    if lanes is not None:
        return [] if _lane_returns(node) else [[[lane] for lane in lanes]]
    held_up_by: Sequence[object] = getattr(node, "held_up_by", ())
    if held_up_by:  # a free lane without resources: all who have them must be stuck
        return [[[lane] for lane in held_up_by]]
    waiting_for: Sequence[Call] = getattr(node, "waiting_for", ())
    may_wait_for: Sequence[Sequence[Call]] = getattr(node, "may_wait_for", ()) if old else ()
    return [
        [list(waiting_for)],
        [[call for call in group if call in old] for group in may_wait_for],
    ]


def _lane_returns(queue: object) -> bool:
    returns = getattr(queue, "lane_returns", None)
    return returns is not None and bool(returns())


def _fail(call: Call, held_up: Call) -> None:
    """Fail a call that goes in a circle; `held_up` is what cannot go on for it."""
    name, busy = call.request.model_name, held_up.request.model_name
    called = "it" if busy == name else f"'{name}'"
    place = held_up.holder
    queued = hasattr(place, "lanes")
    if isinstance(held_up, OrderedCall) and held_up.behind is not None and not queued:
        why = (
            f"model '{busy}' keeps the order of its responses, and an earlier request waits for"
            f" this one. Do without 'preserve_ordering', or do not call '{name}' from a model"
            " that it calls"
        )
    elif any(getattr(lane, "held_up_by", ()) for lane in getattr(place, "lanes", ())):
        why = (
            f"resources that model '{busy}' needs are held by a request that waits for this one."
            " Let the two models need different resources, or raise --rate-limit-resource"
        )
    else:
        why = (
            f"every instance of model '{busy}' is busy with a request that waits for this one."
            f" Raise the instance_group count of '{busy}', or do not call {called} from a model"
            " that it calls"
        )
    call.abort(
        internal(
            f"Model {name} - Error when running inference: the request waits for itself: {why}"
        )
    )
