"""The seam to a host."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pb_utils import InferenceRequest, TritonModelException, _runtime, get_model_dir
from tests.unit.pb_utils.recording import Recorder


@pytest.fixture
def _restored() -> Iterator[None]:
    before = _runtime.current()
    yield
    _runtime.install(before)


def made() -> InferenceRequest:
    return InferenceRequest(inputs=[], requested_output_names=[], model_name="m")


def test_without_a_host_calls_point_at_the_test_harness() -> None:
    incoming = InferenceRequest._from_wire(inputs=[], handle=object())
    for call in (get_model_dir, made().exec, incoming.is_cancelled):
        with pytest.raises(TritonModelException, match=r"needs a host.*pb_utils\.testing"):
            call()


def test_the_model_folder_comes_from_the_runtime(runtime: Recorder) -> None:
    assert get_model_dir() == "/models/m/1"


@pytest.mark.usefixtures("_restored")
def test_an_installed_runtime_answers_in_every_thread() -> None:
    recorder = Recorder()
    _runtime.install(recorder)
    thread = threading.Thread(target=made().exec)
    thread.start()
    thread.join()
    assert len(recorder.requests) == 1


def test_a_runtime_in_use_answers_within_its_block_only() -> None:
    outside = _runtime.current()
    outer, inner = Recorder(), Recorder()
    with _runtime.use(outer):
        with _runtime.use(inner):
            assert _runtime.current() is inner
        assert _runtime.current() is outer
    assert _runtime.current() is outside


def test_threads_of_a_block_see_the_outermost_runtime() -> None:
    seen: list[object] = []
    outer, inner = Recorder(), Recorder()
    with _runtime.use(outer), _runtime.use(inner):
        thread = threading.Thread(target=lambda: seen.append(_runtime.current()))
        thread.start()
        thread.join()
    assert seen == [outer]
