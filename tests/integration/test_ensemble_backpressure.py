"""Eight streams at once through a limited ensemble: a producer of many responses, and a consumer.

Models write down what they do in one file per test; the test reads how many did it at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from tritonclient.utils import InferenceServerException

from tests.clients import Client
from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.ensemble_models import add_ensemble, add_member
from tests.integration.test_ensembles import ModelStream

STREAMS, LENGTH, INSTANCES = 8, 12, 8

EVENTS = """
test, stream, number = (int(value) for value in x)
folder = Path(__file__).parents[3] / "backpressure" / str(test)


def log(event, number=number):
    with open(folder / "events", "a") as file:
        file.write(f"{event} {stream} {number}\\n")
"""
PRODUCE = (
    EVENTS
    + """
log("begin", -1)
try:
    for index in range(number):
        yield {"A": np.array([test, stream, index], np.float32)}
        log("sent", index)
        if (folder / f"break-{stream}-{index}").exists():
            raise KeyError("producer")
        if request.get_response_sender().is_cancelled():
            break
finally:
    log("end", -1)
"""
)
"""Gets [test, stream, length] and sends the responses [test, stream, index]."""
CONSUME = (
    EVENTS
    + """
log("consume")
wait_for(folder / "gate")
threading.Event().wait(0.002)
if (folder / f"fail-{stream}-{number}").exists():
    raise KeyError("consumer")
log("done")
return {"A": x}
"""
)
"""Returns [test, stream, index] after the gate was opened."""


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    repository = module_repository
    for name, code, decoupled in [("produce", PRODUCE, True), ("consume", CONSUME, False)]:
        add_member(
            repository, name, code, inputs="X", outputs="A", decoupled=decoupled, count=INSTANCES
        )
    steps = [("produce", {"X": "I"}, {"A": "t"}), ("consume", {"X": "t"}, {"A": "O"})]
    for limit in (0, 1, 4):
        scheduling = f"max_inflight_requests: {limit}" if limit else ""
        add_ensemble(repository, f"limit_{limit}", "I", "O", steps, scheduling=scheduling)
    return module_serve(repository).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


class Run:
    """The requests of one test, and what models wrote down about them."""

    _last = 0

    def __init__(self, repository: RepositoryBuilder) -> None:
        Run._last += 1
        self._number = Run._last
        self._folder = repository.path.parent / "backpressure" / str(self._number)
        self._folder.mkdir(parents=True)

    def send_request(
        self, stream: ModelStream, limit: int, number: int, length: int = LENGTH
    ) -> None:
        stream.infer(f"limit_{limit}", [self._number, number, length])

    def touch(self, name: str) -> None:
        (self._folder / name).touch()

    def events(self) -> list[tuple[str, int, int]]:
        """What happened so far: the event, the stream, the index of the response."""
        path = self._folder / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(event, int(stream), int(index)) for event, stream, index in map(str.split, lines)]

    def count(self, name: str) -> int:
        return sum(event == name for event, _, _ in self.events())

    def peak(self, begin: str, end: str) -> int:
        """The largest number that had started and not ended at any moment."""
        now = most = 0
        for event, _, _ in self.events():
            now += (event == begin) - (event == end)
            most = max(most, now)
        return most

    def peak_ahead(self) -> int:
        """By how many responses the producer of a stream was ahead of the consumer, at most."""
        most, ahead = 0, Counter[int]()
        for event, stream, _ in self.events():
            ahead[stream] += (event == "sent") - (event == "done")
            most = max(most, ahead[stream])
        return most


@pytest.fixture
def run(module_repository: RepositoryBuilder) -> Run:
    return Run(module_repository)


@pytest.fixture
def streams(host: RunningHost) -> Iterator[list[ModelStream]]:
    found = [ModelStream(host) for _ in range(STREAMS)]
    yield found
    for stream in found:
        stream.__exit__()


def read_indexes(stream: ModelStream, number: int) -> list[int]:
    """The indexes of all responses, in order of arrival; each must be one of this stream."""
    found = [outputs["O"] for outputs in stream.outputs()]
    assert all(value[1] == number for value in found)
    return [int(value[2]) for value in found]


def assert_all_served(run: Run, streams: list[ModelStream], limit: int) -> None:
    """Each stream gets its responses, and at most `limit` consumers work for them at once."""
    for number, stream in enumerate(streams):
        run.send_request(stream, limit, number)
    wait_until(lambda: run.count("consume") == (limit or INSTANCES), "consumers to begin")
    run.touch("gate")
    for number, stream in enumerate(streams):
        found = read_indexes(stream, number)
        assert (found if limit == 1 else sorted(found)) == list(range(LENGTH))
    if limit:
        assert run.peak("consume", "done") == limit
        assert run.peak("begin", "end") <= limit
        assert run.peak_ahead() <= limit + 1  # beside the limit, one waits for its turn


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_eight_streams_get_all_their_responses_within_the_limit(
    streams: list[ModelStream], run: Run, limit: int
) -> None:
    assert_all_served(run, streams, limit)


@pytest.mark.parametrize("cancelled", [1, 4, STREAMS])
@pytest.mark.parametrize("limit", [1, 4])
def test_cancelled_streams_leave_the_limit_to_the_others(
    host: RunningHost,
    module_repository: RepositoryBuilder,
    streams: list[ModelStream],
    run: Run,
    limit: int,
    cancelled: int,
) -> None:
    for number, stream in enumerate(streams):
        run.send_request(stream, limit, number)
        if not number:
            wait_until(lambda: run.count("consume") == limit, "the first stream to use the limit")
    for stream in streams[:cancelled]:
        stream.cancel()
    run.touch("gate")
    for number, stream in enumerate(streams[cancelled:], cancelled):
        assert sorted(read_indexes(stream, number)) == list(range(LENGTH))
    later = [ModelStream(host) for _ in range(STREAMS)]
    try:
        assert_all_served(Run(module_repository), later, limit)
    finally:
        for stream in later:
            stream.__exit__()


@pytest.mark.parametrize("limit", [1, 4])
def test_cancelled_stream_does_not_count_for_the_limit_while_its_models_still_run(
    module_repository: RepositoryBuilder, streams: list[ModelStream], run: Run, limit: int
) -> None:
    cancelled, *others = streams
    run.send_request(cancelled, limit, 0)
    wait_until(lambda: run.count("consume") == limit, "the first stream to use the limit")
    cancelled.cancel()
    assert_all_served(Run(module_repository), others, limit)
    assert run.count("consume") == limit and not run.count("done")
    run.touch("gate")


@pytest.mark.parametrize("limit", [1, 4])
def test_killed_consumers_fail_their_streams_and_leave_the_limit_to_the_others(
    host: RunningHost,
    module_repository: RepositoryBuilder,
    streams: list[ModelStream],
    run: Run,
    limit: int,
) -> None:
    for number, stream in enumerate(streams):
        run.send_request(stream, limit, number)
    wait_until(lambda: run.count("consume") == limit, "consumers to begin")
    begun = {stream for event, stream, _ in run.events() if event == "consume"}
    for index in range(INSTANCES):
        for stub in host.stubs(f"consume_0_{index}"):
            stub.kill()
    run.touch("gate")
    failed = set()
    for number, stream in enumerate(streams):
        try:
            assert sorted(read_indexes(stream, number)) == list(range(LENGTH))
        except InferenceServerException as error:
            assert error.message().startswith(f"in ensemble 'limit_{limit}', "), error.message()
            failed.add(number)
    assert begun <= failed
    assert_all_served(Run(module_repository), streams, limit)


@pytest.mark.parametrize("kind", ["fail", "break"])
@pytest.mark.parametrize("limit", [0, 1, 4])
def test_exception_of_a_member_is_the_error_of_its_stream_only(
    module_repository: RepositoryBuilder,
    streams: list[ModelStream],
    run: Run,
    limit: int,
    kind: str,
) -> None:
    failing = range(0, STREAMS, 2)
    for number in failing:
        run.touch(f"{kind}-{number}-5")
    run.touch("gate")
    for number, stream in enumerate(streams):
        run.send_request(stream, limit, number)
    for number, stream in enumerate(streams):
        if number in failing:
            with pytest.raises(InferenceServerException, match=f"^in ensemble 'limit_{limit}', "):
                read_indexes(stream, number)
        else:
            assert sorted(read_indexes(stream, number)) == list(range(LENGTH))
    assert_all_served(Run(module_repository), streams, limit)
