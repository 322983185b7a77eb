"""Finds the models that speak the OpenAI routes, by the names that clients use."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from host.access.clients import Client
from host.config.schema import ModelConfig
from host.core import Core
from host.errors import HostError
from host.frontends.openai.contract import Contract
from host.frontends.openai.contract_compiler import compile_contract
from host.frontends.openai.fields import CHAT
from host.frontends.openai.model_files import ChatTemplate, OpenAIFiles
from host.frontends.openai.openai_errors import OpenAIError, unknown_model, unsupported_route
from host.models.registry import NotServedError


class FoundModel(NamedTuple):
    """A model that a request names; version -1 is the latest one."""

    contract: Contract
    version: int


class ModelDirectory:
    """The contracts of ready models. Belongs to the event loop.

    Contracts are compiled once for each loaded version.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._contracts: dict[tuple[str, str], tuple[ModelConfig, Contract]] = {}
        self._withdrawn: dict[int, tuple[ChatTemplate, str]] = {}  # with reasons; by identity
        self._owners: dict[str, str] = {}  # models by their other names

    def find(self, name: str, route: str) -> FoundModel:
        """Returns the model of a name that speaks the route. Raises OpenAIError."""
        found = self.find_any(name)
        refusal = found.contract.refusals.get(route)
        if refusal is not None:
            raise unsupported_route(refusal)
        return found

    async def find_when_loaded(self, name: str, route: str, client: Client | None) -> FoundModel:
        """As `find`, but waits for the model if it is not loaded and loads on demand.

        Raises HostError, PERMISSION_DENIED if the client may not ask the model.
        """
        if self._core.loads_on_demand and not self._is_known(name):
            owner, version = _split_version(name)
            if client is not None:
                client.check_model(owner)
            try:
                await self._core.config_when_loaded(owner, version)
            except NotServedError:
                pass  # no model has this name
        found = self.find(name, route)
        if client is not None:
            client.check_model(found.contract.model)
        return found

    def _is_known(self, name: str) -> bool:
        try:
            self.find_any(name)
        except OpenAIError:
            return False
        return True

    def find_any(self, name: str) -> FoundModel:
        """Returns the model of a name, another name, or `NAME:VERSION`. Raises OpenAIError."""
        found = self._find_version(name, "")
        if found is None:
            owner, version = _split_version(name)
            if version:
                found = self._find_version(owner, version)
        if found is None:
            raise unknown_model(name)
        return found

    def _find_version(self, name: str, version: str) -> FoundModel | None:
        number = int(version) if version else -1
        contract = self._contract(name, version)
        if contract is not None:
            return FoundModel(contract, number)
        owner = self._owner(name)
        contract = self._other_contract(owner, name, version) if owner is not None else None
        if contract is None:
            return None
        return FoundModel(contract.with_adapter(name), number)

    def _owner(self, name: str) -> str | None:
        """Returns the ready model that has another name, or an adapter of this name."""
        known = self._owners.get(name)
        if known is not None and self._other_contract(known, name) is not None:
            return known
        for owner in self._ready_names():
            if self._other_contract(owner, name) is not None:
                self._owners[name] = owner
                return owner
        self._owners.pop(name, None)
        return None

    def _other_contract(self, owner: str, name: str, version: str = "") -> Contract | None:
        """Returns the contract of `owner`; None if it is not ready, or has not this other name."""
        contract = self._contract(owner, version)
        if contract is None or name not in (*contract.other_names, *contract.adapters):
            return None
        return contract

    def list_names(self) -> list[str]:
        """Returns the names of all models that speak a route, also other names and adapters."""
        names: list[str] = []
        for name in self._ready_names():
            contract = self._contract(name, "")
            if contract is not None and contract.routes:
                names += [name, *contract.other_names, *contract.adapters]
        return names

    def describe(self, name: str) -> dict[str, object]:
        """Returns the model object of OpenAI; `created` is when it became ready.

        Raises OpenAIError, or HostError.
        """
        found = self.find_any(name)
        created = int(self._core.ready_since(found.contract.model, found.version))
        return {"id": name, "object": "model", "created": created, "owned_by": "pbhost"}

    def withdraw_chat(self, template: ChatTemplate, reason: str) -> None:
        """Takes chat from the version that has this template, until it is loaded again."""
        self._withdrawn[id(template)] = (template, reason)
        self._contracts.clear()

    def _ready_names(self) -> list[str]:
        ready = list(dict.fromkeys(name for name, _ in self._core.list_ready_versions()))
        if len(self._contracts) > 2 * len(ready) + 64:  # models were unloaded
            self._contracts.clear()
        return ready

    def _contract(self, name: str, version: str) -> Contract | None:
        """Returns the contract of a ready version; None if there is none."""
        try:
            config = self._core.model_config(name, version)
        except HostError:
            return None
        key = (name, version)
        known = self._contracts.get(key)
        if known is None or known[0] is not config:
            number = int(version) if version else -1
            files = self._core.extension(OpenAIFiles, name, number) or OpenAIFiles()
            contract = compile_contract(config, files.template, files.adapters)
            if id(files.template) in self._withdrawn:
                reason = self._withdrawn[id(files.template)][1]
                contract = replace(contract, refusals={**contract.refusals, CHAT: reason})
            known = self._contracts[key] = (config, contract)
        return known[1]


def _split_version(name: str) -> tuple[str, str]:
    """Splits `NAME:VERSION`; the version is "" if the name has none."""
    owner, _, version = name.rpartition(":")
    if owner and version.isascii() and version.isdigit() and len(version) < 19:
        return owner, version
    return name, ""
