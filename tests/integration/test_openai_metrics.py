"""The token latencies of streams under /v1, on the metrics port of a real host."""

from __future__ import annotations

import re

from tests.conftest import RepositoryBuilder, RunningHost, Serve
from tests.integration.test_metrics import scrape
from tests.openai_models import LETTERS, LETTERS_CONFIG, WHOLE, WHOLE_CONFIG, chat, complete


def counts(host: RunningHost) -> dict[str, int]:
    """The numbers of observations of the token latencies, by metric and labels."""
    lines = re.findall(r"^(pbhost_(?:time_to_first|inter)_token\S*_count\S*) (\S+)$", scrape(host),
                       re.MULTILINE)  # fmt: skip
    return {name: int(float(value)) for name, value in lines}


def test_streams_of_text_have_token_latencies_and_other_requests_have_none(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    repository.add("letters", LETTERS, LETTERS_CONFIG)
    repository.add("whole", WHOLE, WHOLE_CONFIG)
    host = serve(repository).wait_started()
    assert complete(host, "a|b|c").status == chat(host, "a|b").status == 200
    assert complete(host, "a", model="whole").status == 200
    assert counts(host) == {}
    assert complete(host, "a|b|c", stream=True).events[-1] == "[DONE]"
    assert chat(host, "a|b", stream=True, n=2).events[-1] == "[DONE]"
    labels = '{model="letters",version="1"}'
    assert counts(host) == {
        f"pbhost_time_to_first_token_seconds_count{labels}": 3,
        f"pbhost_inter_token_latency_seconds_count{labels}": 4,
    }
