"""A runtime that records what the API asks of it."""

from __future__ import annotations

from pb_utils import InferenceRequest, InferenceResponse


class Recorder:
    """Answers every call, and remembers it."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, int, str]] = []
        self.requests: list[InferenceRequest] = []
        self.cancel_answers: list[bool] = []
        self.response = InferenceResponse()

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        self.lines.append((level, filename, line, message))

    def exec(self, request: InferenceRequest) -> InferenceResponse:
        self.requests.append(request)
        return self.response

    def model_dir(self) -> str:
        return "/models/m/1"

    def is_cancelled(self, request: InferenceRequest) -> bool:
        return self.cancel_answers.pop(0)
