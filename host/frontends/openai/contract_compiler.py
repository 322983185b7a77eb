"""Compiles what a model takes and gives on the OpenAI routes from its configuration.

Names of tensors say what they mean; `OPENAI` parameters of the configuration say the rest. The
rules are in docs/how-to/openai.md, How a model says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from host.config.findings import Finding, Findings
from host.config.parameters import (
    INPUTS,
    LORA_SEPARATOR,
    OUTPUTS,
    asked_routes,
    default_fields,
    name_pairs,
    openai_parameter,
    other_names,
    suggestion,
)
from host.config.schema import ModelConfig
from host.frontends.openai.bodies import MISSING_PACKAGE, can_parse_forms
from host.frontends.openai.contract import ROUTES, Contract, Input
from host.frontends.openai.fields import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    IMAGES,
    KNOWN_FIELDS,
    SPEECH,
    TRANSCRIPTIONS,
    check_known_fields,
)
from host.frontends.openai.model_files import ChatTemplate
from host.frontends.openai.openai_errors import OpenAIError
from host.inference.tensor_spec import wire_name

SOURCES = {
    "prompt": "prompt",
    "text_input": "prompt",
    "messages": "messages",
    "openai_request": "request",
    "input_ids": "tokens",
    "token_ids": "tokens",
    "input": "input",
    "text": "input",
    "texts": "input",
    "sampling_parameters": "sampling",
    "stream": "stream",
    "streaming": "stream",
    "exclude_input_in_output": "no_echo",
    "sampling_param_exclude_input_from_output": "no_echo",
    "return_finish_reason": "yes",
    "return_num_input_tokens": "yes",
    "return_num_output_tokens": "yes",
    "return_logprobs": "wants_logprobs",
    "return_cumulative_logprob": "nothing",
    "max_new_tokens": "max_tokens",
    "request_output_len": "max_tokens",
    "stop_words": "stop",
    "random_seed": "seed",
    "bad_words": "nothing",
    "image": "images",
    "images": "images",
    "guided_decoding_guide_type": "guide_type",
    "guided_decoding_guide": "schema",
}
"""What fills an input, by its name in lowercase; other inputs take the field of their name."""

_GENERATION = (CHAT, COMPLETIONS)
ROUTES_OF_SOURCE: Mapping[str, Sequence[str]] = {
    "prompt": (CHAT, COMPLETIONS, EMBEDDINGS, IMAGES, SPEECH),
    "messages": (CHAT,),
    "request": _GENERATION,
    "tokens": (COMPLETIONS,),
    "input": (EMBEDDINGS, SPEECH),
    "embedding_request": (EMBEDDINGS,),
    "images": (CHAT,),
    "audio": (CHAT, TRANSCRIPTIONS),
    "schema": (CHAT,),
    "guide_type": (CHAT,),
    "nothing": (),
    "stream": (*_GENERATION, TRANSCRIPTIONS),
    **dict.fromkeys(["sampling", "no_echo", "yes", "wants_logprobs"], _GENERATION),
}
"""The routes whose requests can fill an input, by source; for other sources, `KNOWN_FIELDS`."""

TEXT_SOURCES = ("prompt", "messages", "request", "sampling", "embedding_request")
"""The sources whose values are texts."""

MEANINGS = {
    **dict.fromkeys(
        ["text_output", "text", "generated_text", "output_text", "token", "completion"], "text"
    ),
    "openai_response": "response",
    "embedding": "embedding",
    "embeddings": "embedding",
    "sentence_embedding": "embedding",
    "finish_reason": "finish_reason",
    "num_input_tokens": "num_input_tokens",
    "num_output_tokens": "num_output_tokens",
    "logprobs": "logprobs",
    "tool_calls": "tool_calls",
    "reasoning_content": "reasoning_content",
    "reasoning": "reasoning_content",
}
"""What an output means, by its name in lowercase."""

MEANINGS_OF_ROUTES = {
    TRANSCRIPTIONS: {name: name for name in ("segments", "words", "language", "duration")},
    IMAGES: dict.fromkeys(["image", "images"], "image"),
    SPEECH: dict.fromkeys(["audio", "speech"], "audio"),
}
"""Further meanings of outputs, by name, of models whose `OPENAI` lists a route."""
FILE_MEANINGS = {IMAGES: "image", SPEECH: "audio"}
"""The meaning of the output of a route whose answers are files."""


_FLOATS = ("FP16", "BF16", "FP32", "FP64")


def compile_contract(
    config: ModelConfig, template: ChatTemplate | None = None, adapters: Sequence[str] = ()
) -> Contract:
    """Compiles the contract of a model. `template` and `adapters`: what its folder has."""
    chosen = openai_parameter(config, "OPENAI_CHAT_TEMPLATE")
    separator = openai_parameter(config, LORA_SEPARATOR)
    compiler = _Compiler(config, bool(chosen) or template is not None)
    refusals = compiler.find_refusals()
    return Contract(
        config.name,
        compiler.inputs,
        compiler.outputs,
        refusals,
        chosen,
        template is not None and ("tools" in template.text or bool(template.tool_use_text)),
        openai_parameter(config, "OPENAI_TOOL_PARSER"),
        other_names(config),
        {f"{config.name}{separator}{adapter}": adapter for adapter in adapters},
        default_fields(config),
        config.max_batch_size,
        config.model_transaction_policy.decoupled,
        config.response_cache.enable,
        config.backend,
        tuple(compiler.problems),
    )


def check_defaults(config: ModelConfig) -> Findings:
    """Checks the values of the fields of `OPENAI_DEFAULTS`."""
    try:
        check_known_fields(default_fields(config), asked_routes(config))
    except OpenAIError as error:
        yield Finding(
            f"OPENAI_DEFAULTS of model '{config.name}': {error.message}",
            "parameters[OPENAI_DEFAULTS]",
        )


class _Compiler:
    """Finds the inputs, outputs and routes of a model, and the problems of its parameters.

    What is found without parameters is no problem: the model does not speak the route then.
    """

    def __init__(self, config: ModelConfig, has_template: bool) -> None:
        self._config = config
        self._name: str = config.name
        self._has_template = has_template
        self._asked = asked_routes(config)
        self._texts: list[str] = []  # outputs that could be the text
        self.problems: list[Finding] = []
        self.inputs = self._find_inputs()
        self.outputs = self._find_outputs()

    def find_refusals(self) -> dict[str, str]:
        """Returns why the model does not speak a route, by route."""
        wanted = self._asked if self._asked is not None else self._detect_routes()
        refusals: dict[str, str] = {}
        for route in ROUTES:
            if route not in wanted:
                refusals[route] = self._not_asked(route)
            elif refusal := self._refusal(route) or self._wrong_type(route):
                refusals[route] = refusal
                self._add_problem(refusal)
        spoken = [route for route in ROUTES if route not in refusals]
        for entry in self.inputs:
            if not entry.optional:
                self._check_required(entry, spoken, refusals)
        return refusals

    def _find_inputs(self) -> tuple[Input, ...]:
        config = self._config
        chosen = name_pairs(config, INPUTS)
        self._check_names(INPUTS, "input", chosen, [entry.name for entry in config.input])
        batch = (1,) if config.max_batch_size > 0 else ()
        return tuple(
            Input(
                entry.name,
                chosen.get(entry.name) or SOURCES.get(entry.name.lower(), entry.name.lower()),
                wire_name(entry.data_type),
                (*batch, *entry.dims),
                entry.optional,
            )
            for entry in config.input
        )

    def _find_outputs(self) -> dict[str, str]:
        config = self._config
        chosen = name_pairs(config, OUTPUTS)
        self._check_names(OUTPUTS, "output", chosen, [entry.name for entry in config.output])
        meanings = dict(MEANINGS)
        for route in self._asked or ():
            meanings |= MEANINGS_OF_ROUTES.get(route, {})
        known = sorted(set(meanings.values()))
        for name, meaning in chosen.items():
            if meaning not in known:
                self.problems.append(
                    Finding(
                        f"{OUTPUTS} of model '{self._name}' gives output '{name}' the meaning"
                        f" '{meaning}'; it must be one of {', '.join(known)}",
                        f"parameters[{OUTPUTS}]",
                    )
                )
        outputs: dict[str, str] = {}
        unnamed: dict[str, str] = {}  # datatypes of outputs whose names mean nothing
        for entry in config.output:
            datatype = wire_name(entry.data_type)
            meaning = chosen.get(entry.name) or meanings.get(entry.name.lower(), "")
            if not meaning or (meaning in ("text", "response") and datatype != "BYTES"):
                unnamed[entry.name] = datatype
            else:
                outputs[entry.name] = meaning
        if "text" in chosen.values():
            outputs = {
                name: meaning
                for name, meaning in outputs.items()
                if meaning != "text" or chosen.get(name) == "text"
            }
        self._texts = [name for name, meaning in outputs.items() if meaning == "text"]
        if "response" not in outputs.values() and not self._texts:
            self._texts = [name for name, datatype in unnamed.items() if datatype == "BYTES"]
            if len(self._texts) == 1:
                outputs[self._texts[0]] = "text"
        vectors = [name for name, datatype in unnamed.items() if datatype in _FLOATS]
        if "embedding" not in outputs.values() and len(vectors) == 1:
            outputs[vectors[0]] = "embedding"
        return outputs

    def _check_names(
        self, key: str, kind: str, chosen: Mapping[str, str], known: list[str]
    ) -> None:
        for name in chosen:
            if name not in known:
                self.problems.append(
                    Finding(
                        f"{key} of model '{self._name}' names {kind} '{name}', which the model does"
                        f" not have{suggestion(name, known)}",
                        f"parameters[{key}]",
                    )
                )

    def _add_problem(self, text: str) -> None:
        if self._asked is not None:
            self.problems.append(Finding(text, "parameters[OPENAI]"))

    def _detect_routes(self) -> list[str]:
        """Returns the routes of unmistakable tensor names."""
        config = self._config
        inputs, outputs = (
            {entry.name.lower() for entry in tensors if wire_name(entry.data_type) == "BYTES"}
            for tensors in (config.input, config.output)
        )
        routes = []
        if "text_input" in inputs and "text_output" in outputs:
            routes += [COMPLETIONS, CHAT] if self._has_template else [COMPLETIONS]
        if "openai_request" in inputs and "openai_response" in outputs:
            routes.append(CHAT)
        if "messages" in inputs and any(MEANINGS.get(name) == "text" for name in outputs):
            routes.append(CHAT)
        if "embedding_request" in inputs and "text_output" in outputs:
            routes.append(EMBEDDINGS)
        return routes

    def _not_asked(self, route: str) -> str:
        if route == CHAT and self._asked is None and self._takes("prompt") and self._texts:
            if not self._has_template:
                return _no_template(self._name)
        return f"model '{self._name}' does not do {route}; its configuration may say so with OPENAI"

    def _wrong_type(self, route: str) -> str:
        for entry in self.inputs:
            if entry.source in TEXT_SOURCES and entry.datatype != "BYTES":
                if route in ROUTES_OF_SOURCE[entry.source]:
                    return self._not_text(entry)
        return ""

    def _not_text(self, entry: Input) -> str:
        return (
            f"source '{entry.source}' is text, but input '{entry.name}' of model '{self._name}' is"
            f" TYPE_{entry.datatype}"
        )

    def _takes(self, source: str) -> bool:
        return any(entry.source == source for entry in self.inputs)

    def _refusal(self, route: str) -> str:
        """Returns why the model cannot speak a route that it should; "" if it can."""
        model = f"OPENAI asks for {route}, but model '{self._name}'"
        if route == EMBEDDINGS:
            return self._embedding_refusal(model)
        if route == TRANSCRIPTIONS:
            return self._transcription_refusal(model)
        if route in FILE_MEANINGS:
            return self._media_refusal(route, model)
        return self._generation_refusal(route, model)

    def _embedding_refusal(self, model: str) -> str:
        if self._takes("embedding_request") and self._texts:
            return ""
        if self._config.model_transaction_policy.decoupled:
            return f"{model} is decoupled"
        if "embedding" not in self.outputs.values():
            return f"{model} has no floating-point output"
        texts = [entry for entry in self.inputs if entry.source in ("input", "prompt")]
        if not texts:
            return f"{model} has no input for texts"
        if all(entry.datatype != "BYTES" for entry in texts):
            return self._not_text(texts[0])
        return ""

    def _transcription_refusal(self, model: str) -> str:
        sounds = [entry for entry in self.inputs if entry.source == "audio"]
        if not sounds:
            return f"{model} has no input 'audio'; say in OPENAI_INPUTS which input takes it"
        if all(entry.datatype != "BYTES" for entry in sounds):
            return (
                f"source 'audio' is bytes, but input '{sounds[0].name}' of model"
                f" '{self._name}' is TYPE_{sounds[0].datatype}"
            )
        if len(self._texts) != 1:
            return f"{model} has no output that could be the text; say which in OPENAI_OUTPUTS"
        return "" if can_parse_forms() else f"{model} cannot be asked: {MISSING_PACKAGE}"

    def _generation_refusal(self, route: str, model: str) -> str:
        given = set(self.outputs.values())
        if "response" not in given and len(self._texts) > 1:
            names = ", ".join(f"'{name}'" for name in self._texts)
            return (
                f"{model} has several outputs that could be the text: {names}; say which in"
                " OPENAI_OUTPUTS"
            )
        if not given & {"text", "response"}:
            return f"{model} has no output that could be the text; say which in OPENAI_OUTPUTS"
        if self._takes("request") or (route == CHAT and self._takes("messages")):
            return ""
        if not self._takes("prompt") and (route == CHAT or not self._takes("tokens")):
            return (
                f"{model} has no input for a prompt, for messages or for the whole request: call"
                " one text_input, messages or openai_request, or say it in OPENAI_INPUTS"
            )
        if route == CHAT and not self._has_template:
            if self._asked is None:
                return _no_template(self._name)
            return f"{model} takes a prompt and has no chat template: {_ADD_TEMPLATE}"
        return ""

    def _media_refusal(self, route: str, model: str) -> str:
        """Returns why the model cannot make files of texts; "" if it can."""
        sources = ("input", "prompt") if route == SPEECH else ("prompt",)
        texts = [entry for entry in self.inputs if entry.source in sources]
        if not texts:
            return f"{model} has no input '{sources[0]}'; say in OPENAI_INPUTS which input takes it"
        if all(entry.datatype != "BYTES" for entry in texts):
            return self._not_text(texts[0])
        meaning = FILE_MEANINGS[route]
        types = {entry.name: wire_name(entry.data_type) for entry in self._config.output}
        files = [name for name, given in self.outputs.items() if given == meaning]
        if not files:
            return f"{model} has no output '{meaning}'; say in OPENAI_OUTPUTS which output gives it"
        if types[files[0]] != "BYTES":
            return (
                f"output '{files[0]}' of model '{self._name}' must have the bytes of files as"
                f" TYPE_STRING, but is TYPE_{types[files[0]]}"
            )
        return ""

    def _check_required(
        self, entry: Input, spoken: Sequence[str], refusals: dict[str, str]
    ) -> None:
        """Refuses the spoken routes whose requests cannot fill a required input."""
        filled = [route for route in spoken if self._can_fill(entry, route)]
        text = (
            f"input '{entry.name}' of model '{self._name}' is required, and no request of OpenAI's"
            " has a field for it: make it optional, give it a default in OPENAI_DEFAULTS, or a"
            " source in OPENAI_INPUTS"
        )
        if spoken and not filled:
            self._add_problem(text)
        for route in spoken:
            if route not in filled:
                refusals[route] = (
                    f"model '{self._name}' does not do {route}: its input '{entry.name}' is"
                    f" required, and requests of this route do not fill it"
                    if filled
                    else text
                )

    def _can_fill(self, entry: Input, route: str) -> bool:
        source = entry.source
        if route == EMBEDDINGS and source == "prompt":
            return True
        if source in ROUTES_OF_SOURCE:
            return route in ROUTES_OF_SOURCE[source]
        return source in KNOWN_FIELDS[route] or source in default_fields(self._config)


_ADD_TEMPLATE = (
    "put chat_template.jinja into its folder, or set OPENAI_CHAT_TEMPLATE in its configuration"
)


def _no_template(name: str) -> str:
    return (
        f"model '{name}' does not do chat: it takes a prompt and has no chat template;"
        f" {_ADD_TEMPLATE}"
    )
