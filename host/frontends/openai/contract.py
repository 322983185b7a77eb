"""What one version of a model takes and gives on the OpenAI routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from host.config.findings import Finding
from host.frontends.openai.fields import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    IMAGES,
    SPEECH,
    TRANSCRIPTIONS,
)

ROUTES = (CHAT, COMPLETIONS, EMBEDDINGS, TRANSCRIPTIONS, IMAGES, SPEECH)
"""The routes that a model can speak."""


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a model, and the source that fills it. `dims` include the batch dimension."""

    name: str
    source: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Contract:
    """What one version of a model takes and gives.

    `outputs`: the meaning of each output by its name. `refusals`: why the model does not speak a
    route, by route; a route that is absent is spoken. `template_takes_tools`: the chat template
    renders tools. `adapters`: the LoRA adapters by the names that clients use. `problems`: what is
    wrong with the `OPENAI` parameters.
    """

    model: str
    inputs: tuple[Input, ...]
    outputs: Mapping[str, str]
    refusals: Mapping[str, str]
    template: str = ""
    template_takes_tools: bool = False
    tool_parser: str = ""
    other_names: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_batch_size: int = 0
    decoupled: bool = False
    cached: bool = False
    backend: str = ""
    problems: tuple[Finding, ...] = ()

    def takes(self, source: str) -> bool:
        """Returns whether an input has this source."""
        return any(entry.source == source for entry in self.inputs)

    def gives(self, meaning: str) -> bool:
        """Returns whether an output has this meaning."""
        return meaning in self.outputs.values()

    def with_adapter(self, name: str) -> Contract:
        """Returns the contract of a name, if it is that of an adapter; otherwise this one."""
        adapter = self.adapters.get(name)
        if adapter is None:
            return self
        text = f"'{name}' is a LoRA adapter of model '{self.model}': it does chat and completions"
        return replace(
            self,
            defaults={**self.defaults, "lora_name": adapter},
            refusals={
                **dict.fromkeys(set(ROUTES) - {CHAT, COMPLETIONS}, text),
                **self.refusals,
            },
        )

    @property
    def takes_whole_request(self) -> bool:
        """Whether the model gets the request as JSON."""
        return self.takes("request")

    @property
    def routes(self) -> list[str]:
        """The routes that the model speaks."""
        return [route for route in ROUTES if route not in self.refusals]
