"""Reads the chat template of a model after its load, and checks its `OPENAI` parameters."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from host.config.findings import Finding, Findings, raise_first
from host.config.model_config import LoadedConfig, ModelConfig
from host.config.openai_parameters import (
    LORA_SEPARATOR,
    TOKENIZER,
    openai_parameter,
    other_names,
)
from host.frontends.openai.contract import Contract
from host.frontends.openai.contract_compiler import check_defaults, compile_contract
from host.frontends.openai.fields import CHAT, COMPLETIONS
from host.frontends.openai.template import probe_template
from host.logs.formats import model_fields
from host.models.loading import InstanceUpdate, ModelLoader
from host.models.registry import LoadedModel, Registry
from host.repository.chat_template import ChatTemplate, read_chat_template
from host.repository.lora_adapters import read_lora_adapters
from host.repository.token_counter import read_token_counter

_log = logging.getLogger("pbhost")


class OpenAILoader:
    """Loads versions by another loader, and fails those whose `OPENAI` parameters are wrong.

    The template is read after the load, because the vLLM backend downloads it during the load.
    `finalize`: seconds for `finalize` of a model that is refused.
    """

    def __init__(self, others: ModelLoader, registry: Registry, finalize: float) -> None:
        self._others = others
        self._registry = registry
        self._finalize = finalize
        self._owners: dict[str, str] = {}  # models by the names of OPENAI_NAMES

    async def load(self, directory: Path, version: int, loaded: LoadedConfig) -> LoadedModel:
        """Return a model that can be asked. Raises HostError."""
        raise_first(check_defaults(loaded.config), loaded.source)
        model = await self._others.load(directory, version, loaded)
        try:
            read = asyncio.to_thread(read_chat_template, directory, version, model.config)
            model.chat_template = await read
            await self._read_adapters(directory, model, loaded)
            contract = compile_contract(model.config, model.chat_template, model.lora_adapters)
            raise_first(check_contract(contract, model.config, model.chat_template), loaded.source)
            fault = await find_template_fault(contract, model.chat_template)
            if fault and openai_parameter(model.config, "OPENAI_CHAT_TEMPLATE"):
                raise_first([Finding(fault, _path("OPENAI_CHAT_TEMPLATE"))], loaded.source)
            if fault:
                _log.error("%s", fault, extra=model_fields(model.name, version))
            await self._read_token_counter(contract, directory, model, loaded)
            raise_first(self._claim_names(model.config), loaded.source)
        except BaseException:  # also if cancelled, as the model has no other owner
            await model.stop(0, self._finalize)
            raise
        _log_routes(contract, version)
        return model

    async def update(
        self, model: LoadedModel, loaded: LoadedConfig, finalize: float
    ) -> InstanceUpdate | None:
        """Prepare the instances that `loaded` asks for. Raises HostError."""
        return await self._others.update(model, loaded, finalize)

    async def _read_adapters(
        self, directory: Path, model: LoadedModel, loaded: LoadedConfig
    ) -> None:
        read = asyncio.to_thread(read_lora_adapters, directory, model.version, model.config)
        try:
            model.lora_adapters = await read
        except ValueError as error:
            raise_first([Finding(str(error), _path(LORA_SEPARATOR))], loaded.source)

    async def _read_token_counter(
        self, contract: Contract, directory: Path, model: LoadedModel, loaded: LoadedConfig
    ) -> None:
        """Set the token counter of a model. A problem fails the load if a parameter is set."""
        if not may_need_counter(contract):
            return
        read = asyncio.to_thread(read_token_counter, directory, model.version, model.config)
        try:
            model.token_counter = await read
        except ValueError as error:
            if openai_parameter(model.config, TOKENIZER):
                raise_first([Finding(str(error), _path(TOKENIZER))], loaded.source)
            extra = model_fields(model.name, model.version)
            _log.error("%s; usage is null if the model counts no tokens", error, extra=extra)

    def _claim_names(self, config: ModelConfig) -> Findings:
        """Check that no other model has the names of `OPENAI_NAMES`, and reserve them."""
        entries = dict(self._registry.list_entries())
        for name in other_names(config):
            owner = self._owners.get(name, config.name)
            if name != config.name and name in entries:
                taken = f"'{name}' is a model here"
            elif owner != config.name and owner in entries and entries[owner].is_served_or_loading:
                taken = f"'{name}' already names model '{owner}'"
            else:
                self._owners[name] = config.name
                continue
            yield Finding(f"OPENAI_NAMES of model '{config.name}': {taken}", _path("OPENAI_NAMES"))


def may_need_counter(contract: Contract) -> bool:
    """Return whether the host can count the tokens of a model that may not count them itself."""
    answers = CHAT in contract.routes or COMPLETIONS in contract.routes
    return answers and contract.takes("prompt") and not contract.gives("num_output_tokens")


async def find_template_fault(contract: Contract, template: ChatTemplate | None) -> str:
    """Return why the chat template cannot be rendered, with file and line; "" if it can."""
    needed = CHAT in contract.routes and contract.takes("prompt")
    if template is None or template.complaint or not needed:
        return ""
    fault = await probe_template(contract.model, template)
    return f"OPENAI_CHAT_TEMPLATE of model '{contract.model}': {fault}" if fault else ""


def check_tokenizer(
    contract: Contract, directory: Path, version: int, config: ModelConfig
) -> Findings:
    """Check the tokenizer, if the host may count tokens by it. Blocks."""
    if may_need_counter(contract):
        try:
            read_token_counter(directory, version, config)
        except ValueError as error:
            yield Finding(str(error), _path(TOKENIZER))


def check_adapters(directory: Path, version: int, config: ModelConfig) -> Findings:
    """Check the file of the LoRA adapters. Blocks."""
    try:
        read_lora_adapters(directory, version, config)
    except ValueError as error:
        yield Finding(str(error), _path(LORA_SEPARATOR))


def check_contract(
    contract: Contract, config: ModelConfig, template: ChatTemplate | None
) -> Findings:
    """Check the parameters against the tensors, and the template that a parameter names."""
    yield from contract.problems
    if not openai_parameter(config, "OPENAI_CHAT_TEMPLATE") or template is None:
        return
    if template.complaint:
        yield Finding(template.complaint, _path("OPENAI_CHAT_TEMPLATE"))


def _path(key: str) -> str:
    return f"parameters[{key}]"


def _log_routes(contract: Contract, version: int) -> None:
    extra = model_fields(contract.model, version)
    if contract.routes:
        routes = ", ".join(contract.routes)
        _log.info("model '%s' speaks %s (/v1)", contract.model, routes, extra=extra)
    for refusal in contract.refusals.values():
        _log.debug("%s", refusal, extra=extra)
