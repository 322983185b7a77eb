"""The routes of request paths (docs/reference/http.md, "Endpoints")."""

from __future__ import annotations

import pytest

from host.frontends.http import routes
from host.frontends.http.routes import Endpoint, Route, find_route


@pytest.mark.parametrize(
    ("path", "endpoint", "resource", "version"),
    [
        (b"/v2", routes.SERVER_METADATA, "", ""),
        (b"/v2/health/live", routes.SERVER_LIVE, "", ""),
        (b"/v2/health/ready", routes.SERVER_READY, "", ""),
        (b"/v2/models/stats", routes.STATISTICS, "", ""),
        (b"/v2/logging", routes.LOG_SETTINGS, "", ""),
        (b"/v2/logging/lines", routes.LOG_LINES, "", ""),
        (b"/v2/overview", routes.OVERVIEW, "", ""),
        (b"/v2/trace/setting", routes.TRACE_SETTING, "", ""),
        (b"/v2/models/m/trace/setting", routes.TRACE_SETTING, "m", ""),
        (b"/v2/models/m", routes.MODEL_METADATA, "m", ""),
        (b"/v2/models/m/versions/2/ready", routes.MODEL_READY, "m", "2"),
        (b"/v2/models/m/config", routes.MODEL_CONFIG, "m", ""),
        (b"/v2/models/m/versions/2/stats", routes.STATISTICS, "m", "2"),
        (b"/v2/models/m%2Fn/infer", routes.INFER, "m/n", ""),
        (b"/v2/models/m/generate", routes.GENERATE, "m", ""),
        (b"/v2/models/m/generate_stream", routes.GENERATE_STREAM, "m", ""),
        (b"/v2/repository/index", routes.REPOSITORY_INDEX, "", ""),
        (b"/v2/repository/models/m/load", routes.LOAD_MODEL, "m", ""),
        (b"/v2/repository/models/m/unload", routes.UNLOAD_MODEL, "m", ""),
        (b"/v2/repository/r/models/m/load", routes.NAMED_REPOSITORY_CONTROL, "", ""),
        (b"/v2/systemsharedmemory/status", routes.SYSTEM_STATUS, "", ""),
        (b"/v2/systemsharedmemory/region/r/register", routes.SYSTEM_REGISTER, "r", ""),
        (b"/v2/systemsharedmemory/unregister", routes.SYSTEM_UNREGISTER, "", ""),
        (b"/v2/cudasharedmemory/region/r/status", routes.CUDA_STATUS, "r", ""),
        (b"/v2/cudasharedmemory/region/r/register", routes.CUDA_REGISTER, "r", ""),
        (b"/v2/cudasharedmemory/unregister", routes.CUDA_UNREGISTER, "", ""),
    ],
)
def test_a_path_is_routed_to_its_endpoint(
    path: bytes, endpoint: Endpoint, resource: str, version: str
) -> None:
    assert find_route(path) == Route(endpoint, resource, version)


@pytest.mark.parametrize(
    "path", [b"/", b"/v1", b"/v2/", b"/v2/models/m/", b"/v2/models//infer", b"/v2/health"]
)
def test_an_unknown_path_has_no_route(path: bytes) -> None:
    assert find_route(path) is None
