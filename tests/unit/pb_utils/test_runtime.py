"""The current runtime, and the runtime without a server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pb_utils import (
    InferenceRequest,
    MetricFamily,
    TritonModelException,
    _runtime,
    get_model_dir,
    is_model_ready,
    load_model,
    unload_model,
)
from pb_utils._runtime import shared_memory
from tests.unit.pb_utils.recording import RecordingRuntime


@pytest.fixture
def _restored() -> Iterator[None]:
    before = _runtime.current()
    yield
    _runtime.install(before)


def made() -> InferenceRequest:
    return InferenceRequest(inputs=[], requested_output_names=[], model_name="m")


def test_calls_without_a_server_name_the_test_harness() -> None:
    def family() -> object:
        return MetricFamily("n", "d", MetricFamily.GAUGE)

    for call in (
        get_model_dir,
        shared_memory.free_memory,
        made().exec,
        lambda: made().exec(decoupled=True),
        family,
        lambda: load_model("m"),
        lambda: unload_model("m"),
        lambda: is_model_ready("m"),
    ):
        with pytest.raises(TritonModelException, match=r"needs a host.*pbhost\.testing"):
            call()


def test_the_model_folder_comes_from_the_runtime(runtime: RecordingRuntime) -> None:
    assert get_model_dir() == "/models/m/1"
    assert shared_memory.free_memory() == 1 << 20


@pytest.mark.usefixtures("_restored")
def test_installed_runtime_is_current_in_every_thread() -> None:
    recorder = RecordingRuntime()
    _runtime.install(recorder)
    thread = threading.Thread(target=made().exec)
    thread.start()
    thread.join()
    assert len(recorder.requests) == 1


def test_used_runtime_is_current_within_its_block_only() -> None:
    outside = _runtime.current()
    outer, inner = RecordingRuntime(), RecordingRuntime()
    with _runtime.use(outer):
        with _runtime.use(inner):
            assert _runtime.current() is inner
        assert _runtime.current() is outer
    assert _runtime.current() is outside


def test_threads_of_a_block_see_the_outermost_runtime() -> None:
    seen: list[object] = []
    outer, inner = RecordingRuntime(), RecordingRuntime()
    with _runtime.use(outer), _runtime.use(inner):
        thread = threading.Thread(target=lambda: seen.append(_runtime.current()))
        thread.start()
        thread.join()
    assert seen == [outer]


def seen_by_a_thread() -> object:
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(_runtime.current()))
    thread.start()
    thread.join()
    return seen[0]


def test_persistent_runtime_is_current_in_threads_until_stop_using() -> None:
    lasting, other = RecordingRuntime(), RecordingRuntime()
    with _runtime.use(lasting, persistent=True):
        pass
    with _runtime.use(other):
        assert seen_by_a_thread() is other
    assert seen_by_a_thread() is lasting
    _runtime.stop_using(other)
    assert seen_by_a_thread() is lasting
    _runtime.stop_using(lasting)
    assert type(seen_by_a_thread()) is _runtime.Runtime


def test_no_host_runtime_drops_nothing_and_keeps_error_texts() -> None:
    host = _runtime.Runtime()
    host.drop_metrics([1], [2])
    assert host.error_message("text") == "text"
