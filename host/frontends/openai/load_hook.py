"""Reads the files for `/v1` of a model after its load, and checks its `OPENAI` parameters."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from host.config.findings import Finding, Findings, raise_first
from host.config.model_config import LoadedConfig
from host.config.parameters import (
    LORA_SEPARATOR,
    TOKENIZER,
    openai_parameter,
    other_names,
)
from host.config.schema import ModelConfig
from host.frontends.openai.contract import Contract
from host.frontends.openai.contract_compiler import check_defaults, compile_contract
from host.frontends.openai.fields import CHAT, COMPLETIONS
from host.frontends.openai.model_files import (
    ChatTemplate,
    OpenAIFiles,
    TokenCounter,
    read_chat_template,
    read_lora_adapters,
    read_token_counter,
)
from host.frontends.openai.template import probe_template
from host.logs.formats import model_fields
from host.models.registry import LoadedModel, Registry

_log = logging.getLogger("pbhost")


class OpenAILoadHook:
    """Fails loads of models whose `OPENAI` parameters are wrong.

    The template is read after the load, because the vLLM backend downloads it during the load.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._owners: dict[str, str] = {}  # models by the names of OPENAI_NAMES

    def before_load(self, loaded: LoadedConfig) -> None:
        """Checks what is known without the model. Raises HostError."""
        raise_first(check_defaults(loaded.config), loaded.source)

    async def after_load(self, model: LoadedModel, directory: Path, loaded: LoadedConfig) -> None:
        """Reads the files of the model, and keeps them with it. Raises HostError."""
        version, config = model.version, model.config
        files = OpenAIFiles()
        files.template = await asyncio.to_thread(read_chat_template, directory, version, config)
        files.adapters = await self._read_adapters(directory, model, loaded)
        contract = compile_contract(config, files.template, files.adapters)
        raise_first(check_contract(contract, config, files.template), loaded.source)
        fault = await find_template_fault(contract, files.template)
        if fault and openai_parameter(config, "OPENAI_CHAT_TEMPLATE"):
            raise_first([Finding(fault, _path("OPENAI_CHAT_TEMPLATE"))], loaded.source)
        if fault:
            _log.error("%s", fault, extra=model_fields(model.name, version))
        if may_need_counter(contract):
            files.counter = await self._read_counter(directory, model, loaded)
        raise_first(self._claim_names(config), loaded.source)
        model.extensions[OpenAIFiles] = files
        _log_routes(contract, version)

    async def _read_adapters(
        self, directory: Path, model: LoadedModel, loaded: LoadedConfig
    ) -> tuple[str, ...]:
        try:
            return await asyncio.to_thread(
                read_lora_adapters, directory, model.version, model.config
            )
        except ValueError as error:
            raise_first([Finding(str(error), _path(LORA_SEPARATOR))], loaded.source)
            raise

    async def _read_counter(
        self, directory: Path, model: LoadedModel, loaded: LoadedConfig
    ) -> TokenCounter | None:
        """The token counter of a model. A problem fails the load if a parameter is set."""
        try:
            return await asyncio.to_thread(
                read_token_counter, directory, model.version, model.config
            )
        except ValueError as error:
            if openai_parameter(model.config, TOKENIZER):
                raise_first([Finding(str(error), _path(TOKENIZER))], loaded.source)
            extra = model_fields(model.name, model.version)
            _log.error("%s; usage is null if the model counts no tokens", error, extra=extra)
            return None

    def _claim_names(self, config: ModelConfig) -> Findings:
        """Checks that no other model has the names of `OPENAI_NAMES`, and reserves them."""
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
    """Returns whether the host can count the tokens of a model that may not count them itself."""
    answers = CHAT in contract.routes or COMPLETIONS in contract.routes
    return answers and contract.takes("prompt") and not contract.gives("num_output_tokens")


async def find_template_fault(contract: Contract, template: ChatTemplate | None) -> str:
    """Returns why the chat template cannot be rendered, with file and line; "" if it can."""
    needed = CHAT in contract.routes and contract.takes("prompt")
    if template is None or template.complaint or not needed:
        return ""
    fault = await probe_template(contract.model, template)
    return f"OPENAI_CHAT_TEMPLATE of model '{contract.model}': {fault}" if fault else ""


def check_tokenizer(
    contract: Contract, directory: Path, version: int, config: ModelConfig
) -> Findings:
    """Checks the tokenizer, if the host may count tokens by it. Blocks."""
    if may_need_counter(contract):
        try:
            read_token_counter(directory, version, config)
        except ValueError as error:
            yield Finding(str(error), _path(TOKENIZER))


def check_adapters(directory: Path, version: int, config: ModelConfig) -> Findings:
    """Checks the file of the LoRA adapters. Blocks."""
    try:
        read_lora_adapters(directory, version, config)
    except ValueError as error:
        yield Finding(str(error), _path(LORA_SEPARATOR))


def check_contract(
    contract: Contract, config: ModelConfig, template: ChatTemplate | None
) -> Findings:
    """Checks the parameters against the tensors, and the template that a parameter names."""
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
