"""Decodes header blocks compressed with HPACK (RFC 7541)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.frontends.grpc.h2.headers import Fields, HeaderDecoder
from host.frontends.grpc.h2.hpack import HpackDecoder, UsualRequest
from tests.conftest import ALL

MAX_LIST = 2000
FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelInfer"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]

CAPTURED = {
    "the C core of gRPC, by tritonclient": [
        (
            "40053a706174682a2f696e666572656e63652e47525043496e666572656e6365536572766963652f"
            "4d6f64656c496e666572400a3a617574686f726974790f3132372e302e302e313a34323436338386"
            "400c636f6e74656e742d74797065106170706c69636174696f6e2f67727063400274650874726169"
            "6c6572734014677270632d6163636570742d656e636f64696e67176964656e746974792c20646566"
            "6c6174652c20677a6970400a757365722d6167656e7430677270632d707974686f6e2f312e38352e"
            "3320677270632d632f35382e302e3020286c696e75783b2063687474703229"
        ),
        (
            "c3c28386c1c0bf400c677270632d74696d656f757405353134306dbf000b7472616365706172656e"
            "743730302d31303237633464316333383662626334636436313365333064386631366164662d3165"
            "32666562383934313463333433632d3031000c782d726571756573742d6964106332636536663434"
            "3765643464353762"
        ),
        (
            "c4c38386c2c1c0400c677270632d74696d656f757405353435306dc0000b7472616365706172656e"
            "743730302d33356266393932646339653963363136363132653736393661366365636331622d3763"
            "65343263383231383037326538632d3031000c782d726571756573742d6964106534623036636536"
            "3037343163376138"
        ),
        (
            "c5c48386c3c2c1400c677270632d74696d656f757405353834306dc1000b7472616365706172656e"
            "743730302d63343634373135396333323463393835396238313065373636656339643238362d6232"
            "32323161353830303861303561362d3031000c782d726571756573742d6964103434326533643433"
            "3732303465353264"
        ),
        (
            "c6c58386c4c3c2bec1000b7472616365706172656e743730302d3161326238663166663166643432"
            "6132393735356434633133613930323933312d353134333131393365366333663333392d3031000c"
            "782d726571756573742d69640f356236653665333037643462656463"
        ),
    ],
    "h2load": [
        (
            "049f60d54a5b0b510abe2dbaef64aa52d85a885dc5b3b98856341e42d192a94b6786418b089d5c0b"
            "8170dc6c4f3ccf837a8f9c541c722954d3a5358980aed897075f8b1d75d0620d263d4c4d65644002"
            "7465864d833505b11f40884d83216b1d85a93fa700166a395f14acb6ebb1b2d483706c90af89f900"
            "5015a7597160025038e8c608c6f8051bab003f0f0d0135"
        ),
        "049f60d54a5b0b510abe2dbaef64aa52d85a885dc5b3b98856341e42d192a94b6786c283c1c0bfbe0f0d0135",
        "049f60d54a5b0b510abe2dbaef64aa52d85a885dc5b3b98856341e42d192a94b6786c283c1c0bfbe0f0d0135",
    ],
    "Node.js": [
        (
            "83049f60d54a5b0b510abe2dbaef64aa52d85a885dc5b3b98856341e42d192a94b67418b089d5c0b"
            "8170dc69971b6f8640027465864d833505b11f5f8b1d75d0620d263d4c4d65647a8e9acac8b54790"
            "ab7443015c225c5f408e9acac8b0c842d6958b510f21aa9b903485a9264fafa90b2d03497ea6f66a"
            "ff40899acac8b24d494f6a7f8469f0069f40884d83216b1d85a93fa700166a395f14acb6ebb1b2d4"
            "83706c90af89f9005015a7590ac004a071d18c118df00a30ac00ff1f0888ba51d85b141c640f"
        ),
        (
            "83049f60d54a5b0b510abe2dbaef64aa52d85a885dc5b3b98856341e42d192a94b67c486c3c2c1c0"
            "7f008469f00a9f7f00a700166a395f14acb6ebb1b2d483706c90af89f9005015a75912c004a071d1"
            "8c118df00a312c00ff1f0888ba51d85b141c6417"
        ),
        (
            "83049f60d54a5b0b510abe2dbaef64aa52d85a885dc5b3b98856341e42d192a94b67c686c5c4c3c2"
            "7f008469f0334f7f00a700166a395f14acb6ebb1b2d483706c90af89f9005015a7596560025038e8"
            "c608c6f8051b2b003f1f0888ba51d85b141c6467"
        ),
        (
            "83049f60d54a5b0b510abe2dbaef64aa52d85a885dc5b3b98856341e42d192a94b67c886c7c6c5c4"
            "7f008469f0354f7f00a700166a395f14acb6ebb1b2d483706c90af89f9005015a7596960025038e8"
            "c608c6f8051b4b003f1f0888ba51d85b141c646b"
        ),
    ],
}
"""Blocks of connections whose requests differ: another deadline, trace and metadata each time."""


def decode_by_library(blocks: Iterable[bytes]) -> Iterator[list[tuple[bytes, bytes]] | None]:
    decoder = hpack.Decoder(MAX_LIST)
    for block in blocks:
        try:
            yield [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]
        except (hpack.HPACKError, LookupError):
            yield None
            return


def decode(blocks: Iterable[bytes]) -> Iterator[list[tuple[bytes, bytes]] | None]:
    decoder = HpackDecoder(MAX_LIST)
    for block in blocks:
        try:
            fields, size = decoder._decode(block)
        except ValueError:
            yield None
            return
        assert size == sum(len(name) + len(value) + 32 for name, value in fields)
        assert decoder._size <= decoder._max_size
        yield fields


def assert_equal(blocks: list[bytes]) -> None:
    assert list(decode(blocks)) == list(decode_by_library(blocks))


@pytest.mark.parametrize("client", CAPTURED)
def test_blocks_of_clients_are_decoded(client: str) -> None:
    blocks = [bytes.fromhex(block) for block in CAPTURED[client]]
    fields = list(decode(blocks))
    assert fields == list(decode_by_library(blocks))
    assert all(found and (b"te", b"trailers") in found for found in fields)


@pytest.mark.parametrize("client", CAPTURED)
@pytest.mark.parametrize("change", [0, 1, 0x7F, 0xFF])
def test_a_changed_byte_means_what_it_means_to_the_library(client: str, change: int) -> None:
    first, second = (bytes.fromhex(block) for block in CAPTURED[client][:2])
    for place in range(len(second)):
        changed = second[:place] + bytes((change,)) + second[place + 1 :]
        assert_equal([first, changed, second])
        assert_equal([first, second[:place]])


names = st.sampled_from(["te", "x", "content-type", ":path", "grpc-timeout", "x-" + "n" * 300])
texts = st.text(st.characters(max_codepoint=0xFF), max_size=20).map(lambda text: text.encode())
values = texts | st.binary(max_size=300) | st.sampled_from([b"trailers", b"5S", b"v" * 4096])
field = st.builds(hpack.HeaderTuple, names, values)
private_field = st.builds(hpack.NeverIndexedHeaderTuple, names, values)
step = st.tuples(
    st.lists(field | private_field, max_size=6),
    st.booleans(),  # Huffman coding
    st.none() | st.sampled_from([0, 40, 100, 1000, 4096, 4097]),  # another table size
    st.none() | st.tuples(st.integers(0, 400), st.binary(max_size=6)),  # a damage
)


def encode(steps: list[Any]) -> list[bytes]:
    encoder, blocks = hpack.Encoder(), []
    for fields, huffman, table_size, damage in steps:
        if table_size is not None:
            encoder.header_table_size = table_size
        block = encoder.encode(fields, huffman=huffman)
        if damage is not None:
            at, piece = damage
            block = block[:at] + piece + block[at + len(piece) :]
        blocks.append(block)
    return blocks


@given(st.lists(step, max_size=12), st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=5_000 if ALL else 150, deadline=None)
def test_encoded_damaged_and_other_blocks_are_decoded_as_by_the_library(
    steps: list[Any], others: list[bytes]
) -> None:
    assert_equal([*encode(steps), *others])


@given(st.lists(st.binary(max_size=60), max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_decoded_as_by_the_library(blocks: list[bytes]) -> None:
    assert_equal(blocks)


def test_huffman_codes_of_all_symbols_are_decoded() -> None:
    symbols = bytes(range(256))
    for value in [symbols, symbols[::-1], *(bytes((symbol,)) * 3 for symbol in symbols)]:
        assert_equal([hpack.Encoder().encode([hpack.HeaderTuple("x", value)])])


@pytest.mark.parametrize(
    "block",
    [
        "",
        "80",  # index 0
        "be",  # beyond the dynamic table
        "3fe11f",  # a table of 4096 bytes
        "3fe21f",  # of 4097
        "2082",  # of 0
        "8220",  # after a field
        "ff8080808001",  # integers of five and six bytes
        "ff808080808001",
        "ff8080808080808080808080",
        "0001",
        "00017801",
        "0001787fffffffffff",
        "00817f0178",  # seven bits of padding
        "0081ff0178",  # eight
        "0082ffff00",
        "0081fe00",  # bits of padding that are not 1
        "0084fffffffc00",  # the end of a string inside of it
        "0084ffffffff00",
        "0f2f0161",
        "4001780179be",
    ],
)
def test_limits_and_padding_are_those_of_the_library(block: str) -> None:
    assert_equal([bytes.fromhex(block)])


def test_a_list_is_as_large_as_it_may_be_or_refused() -> None:
    block = hpack.Encoder().encode([("a", "b" * 967)])
    for fields in (2, 3):
        assert_equal([block + b"\xbe" * (fields - 1)])


class Parsed:
    """What is made of the fields of a request."""


def requests(*traces: str) -> list[bytes]:
    """Blocks that differ in their trace only, and change no table."""
    encoder = hpack.Encoder()
    encoder.encode(FIELDS)
    return [
        encoder.encode([*FIELDS, hpack.NeverIndexedHeaderTuple("traceparent", trace)])
        for trace in traces
    ]


def opened() -> HeaderDecoder[Parsed]:
    decoder = HeaderDecoder(lambda fields, size, usual: Parsed(), MAX_LIST)
    decoder.decode_request(hpack.Encoder().encode(FIELDS))
    return decoder


def test_blocks_that_recur_are_parsed_twice_only() -> None:
    decoder, (first, second) = opened(), requests("1", "2")
    parsed = [
        decoder.known.get(block) or decoder.decode_request(block) for block in [first, second] * 4
    ]
    assert len(set(parsed)) == 4
    assert len(set(parsed[2:])) == 2


def test_blocks_that_do_not_recur_are_not_remembered() -> None:
    decoder = opened()
    for block in requests(*map(str, range(100))):
        decoder.decode_request(block)
    assert not decoder.known


def test_a_changed_table_changes_what_known_blocks_mean() -> None:
    encoder = hpack.Encoder()
    seen: list[bytes] = []

    def parse(fields: Fields, size: int, usual: UsualRequest | None) -> Parsed:
        seen.append(fields[-1][1])
        return Parsed()

    decoder = HeaderDecoder(parse, MAX_LIST)
    decoder.decode_request(encoder.encode([*FIELDS, ("x", "old")]))
    again = encoder.encode([*FIELDS, ("x", "old")])
    for _ in range(3):
        decoder.known.get(again) or decoder.decode_request(again)
    decoder.decode_trailers(encoder.encode([("x", "new")]))
    decoder.decode_request(encoder.encode([*FIELDS, ("x", "new")]))
    assert seen == [b"old", b"old", b"old", b"new"]
