"""The OpenAPI document of a server: its endpoints and its loaded models."""

from __future__ import annotations

from collections.abc import Callable

from host.core import Core
from host.frontends.http.api_page.component_schemas import component_schemas
from host.frontends.http.api_page.diagnostics_paths import diagnostics_paths
from host.frontends.http.api_page.model_paths import DescribedModel, model_paths
from host.frontends.http.api_page.operations import Operations, Schema, error_responses
from host.frontends.http.api_page.server_paths import TAGS, server_paths
from host.frontends.http.api_page.tensor_schema import element_schemas
from host.frontends.restrictions import Restrictions

DescribePaths = Callable[[Operations], dict[str, Schema]]
"""Returns path items by path."""


def openapi_document(
    core: Core, restrictions: Restrictions, describe_others: DescribePaths | None = None
) -> Schema:
    """Returns the OpenAPI 3.1 document for the models that are loaded now.

    The extension `x-models` lists the model versions in the form that the page shows; `x-failures`
    has the reasons why models could not be read, by their names. The document contains no values of
    restricted headers. `describe_others` adds paths of other APIs.
    """
    server = core.server_metadata()
    operations = Operations(restrictions)
    models = _models(core)
    paths: dict[str, Schema] = {}
    for model in models:
        paths |= model_paths(model, operations)
    if describe_others is not None:
        paths |= describe_others(operations)
    # The server paths win, as in routing.
    paths |= server_paths(operations) | diagnostics_paths(operations)
    tags = [{"name": name, "description": text} for name, text in TAGS.items()]
    known = TAGS.keys()
    used = [op["tags"][0] for item in paths.values() for op in item.values()]
    tags += [{"name": tag} for tag in dict.fromkeys(used) if tag not in known]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"pbhost: models of {server.name}",
            "version": server.version,
            "description": "The loaded models and the endpoints of the V2 inference protocol.",
        },
        "tags": tags,
        "paths": paths,
        "components": {
            "schemas": {
                **component_schemas(),
                **{f"{name}-element": schema for name, schema in element_schemas().items()},
            },
            "responses": error_responses(),
            "securitySchemes": operations.security_schemes(),
        },
        "x-models": [model.summary() for model in models],
        "x-failures": core.load_failures(),
    }


def _models(core: Core) -> list[DescribedModel]:
    ready = core.list_ready_versions()
    latest = dict(ready)  # the last version of each name
    return [
        DescribedModel(
            core.model_metadata(name, str(version)),
            core.model_config(name, str(version)),
            str(version),
            latest[name] == version,
        )
        for name, version in ready
    ]
