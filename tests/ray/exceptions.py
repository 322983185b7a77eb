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
    "test_api_keys.py::test_a_key_file_that_cannot_be_used_stops_the_start": _START,
    "test_api_keys.py::test_a_client_above_its_rate_is_told_when_to_retry": (
        "behind Ray's own proxies, only a stream that ends with an error has trailing metadata"
    ),
    "test_api_keys.py::test_frontend_processes_count_a_request_once_from_its_wait_for_a_load_to"
    "_its_end": "frontend processes are refused",
    "test_model_control.py::test_a_name_in_two_repositories_is_no_model": _START,
    "test_model_control.py::test_a_repository_that_cannot_be_read_ends_the_start": _START,
    "test_model_control.py::test_a_load_is_tried_again_as_often_as_told": _START,
    "test_ragged.py::test_a_decoupled_model_has_no_outputs_of_a_batch": _START,
    "test_ragged.py::test_options_that_only_tensorrt_has_are_rejected": _START,
}
"""By the file and the name of a test, with or without its parameters."""

_NEW_MODEL = "models that are added need a new deploy"
_GONE = "GET /v2/models/gone/versions/1/ready"
_STRINGS = "arrays of arrays of strings-generate_stream"
_CANCELLED = (
    "the caller's server ends a cancelled request at once, without what the model sends then"
)
_INGRESS_METRICS = "the ingress reports the load, and has no metric of the model"

MODEL_APPS_EXCEPTIONS = {
    **EXCEPTIONS,
    f"test_http_protocol.py::test_each_path_has_its_response[{_GONE}]": (
        "the ingress answers 404: it knows no versions of a model that is unloaded"
    ),
    "test_http_protocol.py::test_responses_to_changes[a load from elsewhere]": _NEW_MODEL,
    "test_http_protocol.py::test_a_load_request_can_contain_the_model": _NEW_MODEL,
    "test_http_protocol.py::test_generate_requests_are_answered_or_refused_as_by_triton"
    f"[{_STRINGS}]": "the stream has begun when the model's replica refuses: the error is an event",
    **{
        f"test_http_protocol.py::test_orca_load_report_headers[{path}-{form}]": _INGRESS_METRICS
        for path in ("generate", "generate_stream")
        for form in ("text", "json")
    },
    "test_http_protocol.py::test_the_options_of_a_server_are_in_its_log": (
        "each server starts one model, and the ingress none"
    ),
    "test_bls_streams.py::test_responses_sent_after_cancellation_arrive": _CANCELLED,
    "test_bls_streams.py::test_model_can_send_a_cancelled_error": _CANCELLED,
    "test_bls_streams.py::test_request_cancelled_in_the_queue_does_not_run": (
        "the request that runs ends at once, too, so that its replica counts two failures"
    ),
    "test_ensembles.py::test_an_ensemble_counts_its_requests_and_the_times_of_its_members": (
        "the deployments of the steps count their times; the ensemble does not learn of them"
    ),
    "test_bls.py::test_failed_bls_requests_return_error_responses": (
        "the other model's replica refuses: 'Error when running inference' is not before its text"
    ),
}
