"""The handlers of the inference endpoints, which each application of these endpoints has."""

from __future__ import annotations

from host.frontends.http import routes
from host.frontends.http.generate import GenerateHandler, LoadReport
from host.frontends.http.handler import Handler
from host.frontends.http.infer import InferHandler
from host.frontends.http.routes import Endpoint
from host.frontends.inference_core import InferenceCore, OpenRequests
from host.frontends.request_headers import HeaderForwarding, Restrictions


class InferenceEndpoints:
    """The handlers by endpoint, and `find_fast_handler` for requests without a task.

    `max_input_size` is `--http-max-input-size`. `load_report`: for the generate endpoints.
    `needs_key`: each request needs an API key; then all have a task, which checks it.
    `open_requests` counts requests without a task; the application counts all others.
    """

    def __init__(
        self,
        core: InferenceCore,
        max_input_size: int,
        restrictions: Restrictions,
        forwarding: HeaderForwarding,
        load_report: LoadReport,
        needs_key: bool,
    ) -> None:
        self.open_requests = OpenRequests()
        needs_task = needs_key or "inference" in restrictions
        infer = InferHandler(core, forwarding, max_input_size, needs_task, self.open_requests)
        self.find_fast_handler = infer.find_handler
        generate = GenerateHandler(core, max_input_size, load_report)
        self.handlers: dict[Endpoint, Handler] = {
            routes.INFER: infer.infer,
            routes.GENERATE: generate.generate,
            routes.GENERATE_STREAM: generate.generate_stream,
        }
