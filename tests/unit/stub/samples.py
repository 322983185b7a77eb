"""One message of every kind, and the sequences of messages in valid sessions."""

from __future__ import annotations

from stub.wire import messages as m
from stub.wire.messages import WireRequest, WireResponse

SOURCE = m.ModelSource("/models/x", 1, "model.py")
REQUEST = WireRequest("id", [], [], {})

TO_STUB: list[m.ToStub] = [
    m.BlockRelease([(0, 4096, 1)]),
    m.OpenArena(3, "/proc/1/fd/9", 1 << 30),
    m.CloseArena(3),
    m.AutoComplete(SOURCE, "{}"),
    m.Initialize("x_0", SOURCE, {"model_name": "x"}, ["OUTPUT0"]),
    m.Execute(1, [REQUEST]),
    m.BlsResponse(1, WireResponse([], {})),
    m.CancelRequest(1, 0),
    m.ResponseAck(1, 0, 5),
    m.HostReply(1, None),
    m.CheckReady(1),
    m.SequencesExpired([1, "a"]),
    m.DescribeStacks(1),
    m.Finalize(),
]
TO_HOST: list[m.ToHost] = [
    m.BlockRelease([]),
    m.Hello(),
    m.AutoCompleted(None),
    m.Initialized(),
    m.LoadFailed("no"),
    m.Response(1, 0, None),
    m.BatchDone(1, 1, 2, 3, 4),
    m.InstanceReleased(1),
    m.BatchReturned(1),
    m.BlsRequest(1, REQUEST, 1, True),
    m.CancelBls(1),
    m.LoadModel(1, "x", "", {}, True),
    m.UnloadModel(1, "x", False),
    m.IsModelReady(1, "x", ""),
    m.NewMetricFamily(1, 1, "name", "text", 0),
    m.NewMetric(1, 2, 1, {}, None),
    m.ChangeMetric(2, "increment", 1.0),
    m.ReadMetric(1, 2),
    m.DropMetrics([1], [2]),
    m.ReadinessResult(1, True, ""),
    m.Stacks(1, ["thread MainThread:"]),
    m.ImportedFiles([("/srv/helper.py", 1 << 60, 12), ("/srv/new.py", 0, 0)]),
    m.ModelWarning("text"),
    m.LogLine(0, "model.py", 3, "text"),
    m.Finalized(None),
]
ALL: dict[type, m.ToStub | m.ToHost] = {type(message): message for message in [*TO_STUB, *TO_HOST]}
