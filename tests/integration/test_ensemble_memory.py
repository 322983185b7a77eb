"""The memory of an ensemble's tensors: no copies in the host, and no unused tensors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pbhost
from host.inference.call import Call
from host.inference.request import InferRequest, Tensor, read_bytes
from tests.conftest import RepositoryBuilder
from tests.integration.ensemble_models import add_ensemble, add_member
from tests.integration.test_inprocess import options
from tests.waiting import eventually

MEGABYTE = 1 << 20
BIG = 16 * MEGABYTE

MAKE = "return {'A': np.full(4 << 20, x[0], np.float32)}"
HOLD = """
Path("{folder}/holding").touch()
wait_for("{folder}/go")
return {{"A": x[:1]}}
"""


def request(model: str, array: npt.NDArray[Any], *outputs: str) -> InferRequest:
    tensor = Tensor("I", "FP32", list(array.shape), array.tobytes())
    return InferRequest(model, [tensor], requested_outputs=list(outputs))


@pytest.fixture
def folder(repository: RepositoryBuilder) -> Path:
    """Models that make, copy and hold 16 MB; where they say so."""
    path = repository.path.parent
    add_member(repository, "make", MAKE, inputs="X", outputs="A")
    add_member(repository, "copy", 'return {"A": x + 1}', inputs="X", outputs="A")
    add_member(repository, "hold", HOLD.format(folder=path), inputs="X", outputs="A")
    add_ensemble(
        repository, "line", "I", "O",
        [("make", {"X": "I"}, {"A": "t"}), ("copy", {"X": "t"}, {"A": "u"}),
         ("hold", {"X": "u"}, {"A": "O"})],
    )  # fmt: skip
    add_ensemble(
        repository, "fork", "I", "O P",
        [("hold", {"X": "I"}, {"A": "O"}), ("copy", {"X": "I"}, {"A": "P"})],
    )  # fmt: skip
    return path


def test_a_tensor_goes_when_the_last_step_that_takes_it_has_ended(
    repository: RepositoryBuilder, folder: Path
) -> None:
    """The first step's output goes while the third one still runs, and has never been the host's.

    Of two outputs of 16 MB there is one left.
    """

    async def main() -> None:
        async with pbhost.Server(options(repository)) as server:
            taken = server._open_components.pool.arenas.used_bytes
            call: Call = server.core.infer(request("line", np.ones(1, np.float32)))
            await eventually((folder / "holding").exists, "the third step")
            await eventually(
                lambda: BIG <= taken()[1] < 2 * BIG, f"one tensor to be left: {taken()}"
            )
            assert taken()[0] < MEGABYTE
            (folder / "go").touch()
            response = await call
            assert np.frombuffer(read_bytes(response.outputs[0].data), np.float32).tolist() == [2]
            await eventually(lambda: taken()[1] < MEGABYTE, f"all tensors to be gone: {taken()}")

    asyncio.run(main())


def test_a_tensor_of_two_steps_is_put_into_shared_memory_once(
    repository: RepositoryBuilder, folder: Path
) -> None:
    """And goes when the slower one has ended, although the request itself is still there."""

    async def main() -> None:
        async with pbhost.Server(options(repository)) as server:
            taken = server._open_components.pool.arenas.used_bytes
            call = server.core.infer(request("fork", np.ones(4 * MEGABYTE, np.float32)))
            await eventually((folder / "holding").exists, "the slower step")
            assert BIG <= taken()[0] < 2 * BIG
            (folder / "go").touch()
            response = await call
            assert [output.name for output in response.outputs] == ["O", "P"]
            assert np.frombuffer(read_bytes(response.outputs[1].data), np.float32)[-1] == 2
            await eventually(lambda: taken()[0] < MEGABYTE, f"the input to be gone: {taken()}")
            del response
            await eventually(lambda: taken()[1] < MEGABYTE, f"all tensors to be gone: {taken()}")

    asyncio.run(main())


def test_an_output_that_is_not_requested_is_not_kept(
    repository: RepositoryBuilder, folder: Path
) -> None:
    (folder / "go").touch()

    async def main() -> None:
        async with pbhost.Server(options(repository)) as server:
            big = np.ones(4 * MEGABYTE, np.float32)
            response = await server.core.infer(request("fork", big, "O"))
            assert [output.name for output in response.outputs] == ["O"]
            assert server.core.statistics("copy", "")[0].inference_count == 0

    asyncio.run(main())


def test_a_cancelled_request_leaves_nothing(repository: RepositoryBuilder, folder: Path) -> None:
    async def main() -> None:
        async with pbhost.Server(options(repository)) as server:
            taken = server._open_components.pool.arenas.used_bytes
            call = server.core.infer(request("line", np.ones(1, np.float32)))
            await eventually((folder / "holding").exists, "the third step")
            call.cancel()
            (folder / "go").touch()
            await eventually(lambda: taken()[1] < MEGABYTE, f"all tensors to be gone: {taken()}")
            await eventually(
                lambda: server.core.statistics("line", "")[0].inference_stats.fail.count == 1,
                "the failure to be counted",
            )

    asyncio.run(main())


def test_a_tensor_that_finds_no_room_fails_the_request(repository: RepositoryBuilder) -> None:
    add_member(repository, "copy", 'return {"A": x[:1]}', inputs="X", outputs="A")
    add_ensemble(
        repository, "fork", "I", "O P",
        [("copy", {"X": "I"}, {"A": "O"}), ("copy", {"X": "I"}, {"A": "P"})],
    )  # fmt: skip

    async def main() -> None:
        small = options(repository, arena_byte_size=4 * MEGABYTE)
        async with pbhost.Server(small) as server:
            with pytest.raises(pbhost.HostError, match="^in ensemble 'fork', Failed to increase"):
                await server.core.infer(request("fork", np.ones(4 * MEGABYTE, np.float32)))
            response = await server.core.infer(request("fork", np.ones(20_000, np.float32)))
            assert len(response.outputs) == 2

    asyncio.run(main())
