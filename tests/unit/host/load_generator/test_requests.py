"""The requests of a load, from values, random numbers and files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from host.client.messages import new_request
from host.errors import HostError
from host.load_generator.job import Protocol
from host.load_generator.requests import (
    Inputs,
    Prompts,
    encode_chains,
    make_inferences,
    make_sequence,
)
from pb_utils._text_form import InvalidInput

CONFIG = {
    "name": "m",
    "max_batch_size": 4,
    "input": [
        {"name": "HALF", "data_type": "TYPE_BF16", "dims": [2]},
        {"name": "TEXT", "data_type": "TYPE_STRING", "dims": [2]},
        {"name": "FLAG", "data_type": "TYPE_BOOL", "dims": [1]},
    ],
}
ONE = b"\x80\x3f"  # 1.0 as BF16


def inputs_of(**options: Any) -> dict[str, tuple[list[int], bytes]]:
    """The shape and the content of each input of the only request."""
    (message,) = make_inferences(CONFIG, "m", "", Inputs(**options))
    return {
        entry.name: (list(entry.shape), content)
        for entry, content in zip(message.inputs, message.raw_input_contents, strict=True)
    }


def text(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


def test_each_data_type_has_the_batch_that_was_asked_for() -> None:
    once, thrice = inputs_of(), inputs_of(batch_size=3)
    for name, (shape, content) in once.items():
        assert thrice[name] == ([3, *shape[1:]], 3 * content)
    given = inputs_of(given=[("HALF", "[[1, 1], [1, 1]]")], batch_size=2)
    assert given["HALF"] == ([2, 2], 4 * ONE)
    with pytest.raises(InvalidInput, match="--batch-size: input 'HALF' has a batch of 2"):
        inputs_of(given=[("HALF", "[[1, 1], [1, 1]]")], batch_size=3)


def test_zeros_and_long_texts_replace_random_values_and_not_given_ones() -> None:
    made = inputs_of(zero=True, given=[("FLAG", "true")])
    assert made == {
        "HALF": ([1, 2], bytes(4)), "TEXT": ([1, 2], 2 * text(b"")), "FLAG": ([1, 1], b"\1"),
    }  # fmt: skip
    content = inputs_of(string_length=300)["TEXT"][1]
    assert [len(content), content[:4], content[304:308]] == [608, text(bytes(300))[:4]] + [
        text(bytes(300))[:4]
    ]


def test_a_file_has_values_of_each_data_type_or_bytes(tmp_path: Path) -> None:
    raw = base64.b64encode(np.array([1, 1], np.float32).tobytes()[2:4] + ONE).decode()
    halves: list[Any] = [[1.0, 1], {"content": [1, 1], "shape": [2]}, {"b64": raw}]
    for half in halves:
        step = {"HALF": half, "TEXT": ["a", 7], "FLAG": [1]}
        path = tmp_path / "data.json"
        path.write_text(json.dumps({"data": [step]}))
        assert inputs_of(data=str(path), batch_size=2) == {
            "HALF": ([2, 2], 4 * ONE),
            "TEXT": ([2, 2], 2 * (text(b"a") + text(b"7"))),
            "FLAG": ([2, 1], 2 * b"\1"),
        }
    wrong: list[tuple[Any, str]] = [
        ([1.0], r"1 elements do not fit the shape \[2\]"),
        (["x", 1], "expected BF16, got "),
        ({"b64": "AAAA"}, "3 bytes for BF16"),
    ]
    for half, problem in wrong:
        step = {"HALF": half, "TEXT": ["a", 7], "FLAG": [1]}
        path.write_text(json.dumps({"data": [step]}))
        with pytest.raises(InvalidInput, match=f"request 1, input 'HALF': {problem}"):
            inputs_of(data=str(path))


@pytest.mark.parametrize("api", ["infer", "chat"])
def test_a_header_of_the_user_replaces_that_of_the_load(api: str) -> None:
    headers = {"host": "model.example", "Content-type": "application/x-tensors"}
    url = "http://127.0.0.1:8000"
    if api == "infer":
        ((request,),) = encode_chains([[new_request("m", "")]], url, Protocol.HTTP, headers)
    else:
        (request,) = Prompts(api, "m", ["hello"]).encode(url, headers)
    fields = request.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
    assert [one for one in fields if one.startswith(b"host:")] == [b"host: model.example"]
    kinds = [one for one in fields if one.startswith(b"content-type:")]
    assert kinds == [b"content-type: application/x-tensors"]


def test_the_limit_of_bytes_is_that_of_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("host.load_generator.requests.MOST_BYTES", 50_000)
    message = new_request("m", "")
    message.raw_input_contents.append(bytes(10_000))
    for count, fits in ((2, True), (3, False)):
        sequences = (make_sequence([message], 2, number) for number in range(1, count + 1))
        if fits:
            chains = encode_chains(sequences, "grpc://127.0.0.1:1", Protocol.GRPC, {})
            assert [len(chain) for chain in chains] == [2] * count
            continue
        with pytest.raises(HostError, match="the requests have more than"):
            encode_chains(sequences, "grpc://127.0.0.1:1", Protocol.GRPC, {})
