"""The response to a request, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from host.inference.request import Parameter


@dataclass(frozen=True)
class Result:
    """Outputs by name, as arrays with memory of their own, and the parameters of the response."""

    model_name: str
    model_version: int
    id: str
    outputs: dict[str, npt.NDArray[Any]]
    parameters: dict[str, Parameter]

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """The output with this name. Raises KeyError."""
        return self.outputs[name]
