"""How far a member that sends a stream may be ahead of the steps that take it.

Producers write down how many of their responses have been sent, after each; consumers, how many
they have begun with, and wait until they may end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from tests.clients import Client, tensor
from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.ensemble_models import add_ensemble, add_member, array_of
from tests.integration.test_ensembles import ModelStream, counts

PRODUCE = """
import numpy as np
folder = Path(__file__).parents[3] / "runs" / str(int(x[0]))
for number in range(int(x[1])):
    yield {"A": np.array([x[0], number], np.float32)}
    done = len(list(folder.glob("done-*")))
    with open(folder / "sent", "a") as file:
        file.write(f"{number + 1 - done}\\n")
    if request.get_response_sender().is_cancelled():
        break
(folder / "ended").touch()
"""
"""Gets [test, length] and sends the responses [test, number]. It records how far it is ahead."""
CONSUME = """
folder, number = Path(__file__).parents[3] / "runs" / str(int(x[0])), int(x[1])
(folder / f"begun-{number}").touch()
wait_for(folder / "gate")
if (folder / "fail").exists() and number == 1:
    error = pb_utils.TritonError("no more", pb_utils.TritonError.UNSUPPORTED)
    return pb_utils.InferenceResponse(error=error)
(folder / f"done-{number}").touch()
return {"A": x}
"""
LIMIT = "max_inflight_requests: 2"


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    repository = module_repository
    add_member(repository, "produce", PRODUCE, inputs="X", outputs="A", decoupled=True, count=2)
    add_member(repository, "pass", 'return {"A": x}', inputs="X", outputs="A")
    add_member(repository, "both", 'return {"A": x + y}', inputs="X Y", outputs="A")
    add_member(repository, "consume", CONSUME, inputs="X", outputs="A", count=4)
    produce = ("produce", {"X": "I"}, {"A": "t"})
    consume = ("consume", {"X": "t"}, {"A": "O"})
    add_ensemble(repository, "limited", "I", "O", [produce, consume], scheduling=LIMIT)
    add_ensemble(repository, "open", "I", "O", [produce, consume])
    add_ensemble(
        repository, "chain", "I", "O",
        [produce, ("pass", {"X": "t"}, {"A": "u"}), ("consume", {"X": "u"}, {"A": "O"})],
        scheduling=LIMIT,
    )  # fmt: skip
    add_ensemble(
        repository, "fork", "I", "O",
        [produce, ("consume", {"X": "t"}, {"A": "u"}), ("pass", {"X": "t"}, {"A": "v"}),
         ("both", {"X": "u", "Y": "v"}, {"A": "O"})],
        scheduling=LIMIT,
    )  # fmt: skip
    add_ensemble(repository, "source", "I", "O", [("produce", {"X": "I"}, {"A": "O"})])
    add_ensemble(
        repository, "nested", "I", "O",
        [("source", {"I": "I"}, {"O": "t"}), consume], scheduling=LIMIT,
    )  # fmt: skip
    return module_serve(repository).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


@pytest.fixture
def folder(module_repository: RepositoryBuilder) -> Path:
    return module_repository.path.parent / "runs"


class Held:
    """A request with a number of its own, whose consumers are held."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder / str(number), number
        self._folder.mkdir(parents=True)

    def send_request(self, stream: ModelStream, model: str, length: int) -> None:
        stream.infer(model, [self._number, length])

    def path(self, name: str) -> Path:
        return self._folder / name

    def ahead(self) -> list[int]:
        """After each response, how many more had been sent than consumers were done with."""
        path = self.path("sent")
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    @property
    def begun(self) -> int:
        return len(list(self._folder.glob("begun-*")))

    def wait_sent(self, count: int) -> None:
        wait_until(lambda: len(self.ahead()) >= count, f"{count} to be sent")

    def go(self) -> None:
        self.path("gate").touch()


def settled(client: Client) -> None:
    """Waits until the host has handled all earlier messages."""
    for _ in range(5):
        client.infer("pass", [tensor("X", array_of([0]))])


def numbers(found: list[tuple[dict[str, Any], bool]]) -> list[int]:
    return sorted(int(outputs["O"][1]) for outputs, _ in found if outputs)


@pytest.mark.parametrize(
    ("number", "model", "most"),
    [
        pytest.param(1, "limited", 3, id="one that waits, beside the two"),
        pytest.param(2, "nested", 3, id="of an ensemble that has no limit of its own"),
        pytest.param(3, "fork", 3, id="several who take it"),
        pytest.param(4, "chain", 5, id="two more in the step between"),
    ],
)
def test_a_stream_is_held_up_when_a_step_has_to_wait(
    host: RunningHost, client: Client, folder: Path, number: int, model: str, most: int
) -> None:
    held = Held(folder, number)
    with ModelStream(host) as stream:
        held.send_request(stream, model, 30)
        wait_until(lambda: held.begun == 2, "two of the consumer")
        held.wait_sent(3)
        settled(client)
        assert max(held.ahead()) <= most and held.begun == 2
        held.go()
        found = stream.all()
    assert numbers(found) == [n * (2 if model == "fork" else 1) for n in range(30)]
    assert max(held.ahead()) <= most


def test_without_a_limit_a_member_is_held_up_by_running_steps(
    host: RunningHost, client: Client, folder: Path
) -> None:
    held = Held(folder, 5)
    with ModelStream(host) as stream:
        held.send_request(stream, "open", 140)
        held.wait_sent(128)
        settled(client)
        assert len(held.ahead()) <= 129
        held.go()
        assert numbers(stream.all()) == list(range(140))


def test_the_limit_is_that_of_all_requests(host: RunningHost, client: Client, folder: Path) -> None:
    """Another one has taken it up: of the second stream, one waits, and no more are sent."""
    first, second = Held(folder, 6), Held(folder, 7)
    with ModelStream(host) as one, ModelStream(host) as other:
        first.send_request(one, "limited", 50)
        first.wait_sent(3)
        second.send_request(other, "limited", 50)
        second.wait_sent(1)
        settled(client)
        assert len(second.ahead()) == 1 and second.begun == 0
        first.go()
        second.go()
        assert numbers(one.all()) == numbers(other.all()) == list(range(50))


def test_a_consumer_that_fails_lets_the_stream_come_to_its_end(
    host: RunningHost, client: Client, folder: Path
) -> None:
    held = Held(folder, 9)
    held.path("fail").touch()
    failed = counts(client, "limited")[1]
    with ModelStream(host) as stream:
        held.send_request(stream, "limited", 30)
        held.wait_sent(3)
        held.go()
        with pytest.raises(InferenceServerException, match="^in ensemble 'limited', no more$"):
            while True:
                stream.next()
    assert held.path("ended").exists() and len(held.ahead()) == 30
    assert counts(client, "limited")[1] == failed + 2
    after = Held(folder, 10)
    after.go()
    with ModelStream(host) as stream:  # the steps of the one before have left their places
        after.send_request(stream, "limited", 20)
        assert numbers(stream.all()) == list(range(20))


def test_a_request_that_is_cancelled_does_not_wait(
    host: RunningHost, client: Client, folder: Path
) -> None:
    held = Held(folder, 11)
    with ModelStream(host) as stream:
        held.send_request(stream, "nested", 1000)
        held.wait_sent(3)
        stream.cancel()
        wait_until(held.path("ended").exists, "the producer to see it")
    assert len(held.ahead()) < 1000
    held.go()
    after = Held(folder, 12)
    after.go()
    with ModelStream(host) as stream:
        after.send_request(stream, "nested", 20)
        assert numbers(stream.all()) == list(range(20))


def test_the_limit_is_shown(client: Client) -> None:
    config = client.get_model_config("limited").config
    assert config.ensemble_scheduling.max_inflight_requests == 2
