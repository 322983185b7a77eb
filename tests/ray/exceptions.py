"""The tests of the protocols that cannot hold on Ray, and why."""

from __future__ import annotations

_MEMORY = "the memory of clients is refused: replicas run on any node"
_CACHE = "the local cache is refused: each replica would have another one"
_FRAGMENT = "the proxy ends a path at '#'"
_METHOD = "the proxy knows the methods of HTTP alone"
_START = "Ray starts a replica that has failed again: there is no exit status"

_REGIONS = (
    "a region without a name",
    "a region without a key",
    "a region without a size",
    "a region without memory",
    "a region of slashes",
    "a region of the host's",
    "a region that is not there",
    "all regions",
    "all of the GPU",
    "a region of a GPU without a name",
    "a region of a GPU without a handle",
    "a region of a GPU",
)

EXCEPTIONS = {
    "test_ensembles.py::test_inputs_and_outputs_may_lie_in_the_clients_memory": _MEMORY,
    "test_http.py::test_tensors_in_a_clients_shared_memory": _MEMORY,
    **{f"test_http_protocol.py::test_responses_to_changes[{one}]": _MEMORY for one in _REGIONS},
    "test_ensembles.py::test_responses_are_kept": _CACHE,
    "test_ensembles.py::test_a_limited_ensemble_gets_kept_responses_of_a_member": _CACHE,
    "test_http_protocol.py::test_each_path_has_its_response[GET /v2/health/live#top]": _FRAGMENT,
    "test_http_protocol.py::test_each_path_has_its_response[GET /v2/models/iden#tity]": _FRAGMENT,
    "test_http_protocol.py::test_each_path_has_its_response[BREW /v2/health/live]": _METHOD,
    "test_http_protocol.py::test_each_path_has_its_response[BREW /v2/coffee]": _METHOD,
    "test_http_protocol.py::test_a_path_may_have_bytes_that_are_not_ascii": (
        "the proxy refuses paths that are not ASCII"
    ),
    "test_streams.py::test_the_model_is_finalized_after_its_threads_have_sent": (
        "a replica waits for streams that clients keep open, until Ray kills it"
    ),
    "test_coroutines.py::test_a_concurrency_that_makes_no_sense_is_refused": _START,
    "test_ragged.py::test_a_decoupled_model_has_no_outputs_of_a_batch": _START,
    "test_ragged.py::test_options_that_only_tensorrt_has_are_rejected": _START,
}
"""By the file and the name of a test, with or without its parameters."""
