"""Finds the models that speak the OpenAI routes, by the names that clients use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from host.access.clients import Client
from host.core import Core
from host.errors import HostError
from host.frontends.openai.contract import Contract
from host.frontends.openai.contract_compiler import compile_contract
from host.frontends.openai.fields import CHAT
from host.frontends.openai.model_files import OpenAIFiles
from host.frontends.openai.openai_errors import OpenAIError, unknown_model, unsupported_route
from host.models.registry import NotServedError


class FoundModel(NamedTuple):
    """A model that a request names; version -1 is the latest one."""

    contract: Contract
    version: int


class ModelDirectory:
    """The contracts of ready models. Belongs to the event loop."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._contracts: dict[tuple[str, str], Contract] = {}
        self._owners: dict[str, str] | None = None  # models by their other names and adapters
        core.add_watcher(self.refresh)

    def refresh(self) -> None:
        """Called when other models can be found, or models speak other routes."""
        self._contracts.clear()
        self._owners = None

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
        contract = self._contract(name, version)
        if contract is None:
            owner = self._find_owner(name)
            contract = None if owner is None else self._contract(owner, version)
            if contract is None or name not in (*contract.other_names, *contract.adapters):
                return None
        return FoundModel(contract.with_adapter(name), int(version) if version else -1)

    def _find_owner(self, name: str) -> str | None:
        """Returns the ready model that has another name, or an adapter of this name."""
        if self._owners is None:
            self._owners = {}
            for owner, contract in self._ready_contracts():
                for other in (*contract.other_names, *contract.adapters):
                    self._owners.setdefault(other, owner)
        return self._owners.get(name)

    def list_names(self) -> list[str]:
        """Returns the names of all models that speak a route, also other names and adapters."""
        names: list[str] = []
        for name, contract in self._ready_contracts():
            if contract.routes:
                names += [name, *contract.other_names, *contract.adapters]
        return names

    def describe(self, name: str) -> dict[str, object]:
        """Returns the model object of OpenAI; `created` is when it became ready.

        Raises OpenAIError, or HostError.
        """
        found = self.find_any(name)
        created = int(self._core.ready_since(found.contract.model, found.version))
        return {"id": name, "object": "model", "created": created, "owned_by": "pbhost"}

    def _ready_contracts(self) -> Iterator[tuple[str, Contract]]:
        for name in dict.fromkeys(name for name, _ in self._core.list_ready_versions()):
            contract = self._contract(name, "")
            if contract is not None:
                yield name, contract

    def _contract(self, name: str, version: str) -> Contract | None:
        """Returns the contract of a ready version; None if there is none."""
        contract = self._contracts.get((name, version))
        if contract is None:
            try:
                config = self._core.model_config(name, version)
            except HostError:
                return None
            number = int(version) if version else -1
            files = self._core.extension(OpenAIFiles, name, number) or OpenAIFiles()
            contract = compile_contract(config, files.template, files.adapters)
            if files.chat_refusal:
                refusals = {**contract.refusals, CHAT: files.chat_refusal}
                contract = replace(contract, refusals=refusals)
            self._contracts[name, version] = contract
        return contract


def _split_version(name: str) -> tuple[str, str]:
    """Splits `NAME:VERSION`; the version is "" if the name has none."""
    owner, _, version = name.rpartition(":")
    if owner and version.isascii() and version.isdigit() and len(version) < 19:
        return owner, version
    return name, ""
