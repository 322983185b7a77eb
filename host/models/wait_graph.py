"""Finds BLS calls that could only go on after themselves."""

from __future__ import annotations

from host.inference import Call


def is_stuck(call: Call) -> bool:
    """Whether no event but a failure can ever let this call end.

    A queued call is stuck if every lane of its model is; a lane, if the batch on it waits for a
    stuck call. A call met again on the way closes a circle.
    """
    return _stuck(call, set())


def _stuck(call: Call, path: set[int]) -> bool:
    if call.finished:
        return False
    if id(call) in path:
        return True
    path.add(id(call))
    try:
        return _place_stuck(call.place, path)
    finally:
        path.discard(id(call))


def _place_stuck(place: object, path: set[int]) -> bool:
    lanes = getattr(place, "lanes", None)
    if lanes is None:
        return place is not None and any(
            _stuck(other, path) for other in getattr(place, "waiting_for", ())
        )
    return bool(lanes) and all(
        any(_stuck(other, path) for other in lane.waiting_for) for lane in lanes
    )
