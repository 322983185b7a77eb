"""The handlers of the inference endpoints, which each application of these endpoints has."""

from __future__ import annotations

from host.frontends.http import routes
from host.frontends.http.fast_path import FastInference
from host.frontends.http.generate import GenerateHandler, LoadReport
from host.frontends.http.handler import Handler
from host.frontends.http.infer import InferHandler
from host.frontends.http.inference_header import InferenceHeaderReader
from host.frontends.http.routes import Endpoint
from host.frontends.http.tensors import JsonInputLimit
from host.frontends.inference_core import InferenceCore, OpenRequests
from host.frontends.request_headers import HeaderForwarding, Restrictions


class InferenceEndpoints:
    """The handlers by endpoint, and the fast path of the infer endpoint.

    `max_input_size` is `--http-max-input-size`. `load_report`: for the generate endpoints.
    `needs_key`: each request needs an API key; the fast path checks none, so it takes no request
    then. `open_requests` counts the requests of the fast path; the application counts all others.
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
        header_reader = InferenceHeaderReader(JsonInputLimit(max_input_size))
        self.find_fast_handler = FastInference(
            core,
            restrictions,
            forwarding,
            max_input_size,
            header_reader,
            self.open_requests,
            not needs_key,
        ).find_handler
        infer = InferHandler(core, forwarding, max_input_size, header_reader)
        generate = GenerateHandler(core, max_input_size, load_report)
        self.handlers: dict[Endpoint, Handler] = {
            routes.INFER: infer.infer,
            routes.GENERATE: generate.generate,
            routes.GENERATE_STREAM: generate.generate_stream,
        }
