"""A minimal language model: counts which token follows the last two."""

import random
import re
from collections import Counter, defaultdict

TOKEN = re.compile(
    r"\s*(?:[\w'-]+|[^\w\s])"
)  # a word or a punctuation mark, with the space before it
LONGEST = 2


def tokens_of(text):
    return TOKEN.findall(re.sub(r"\s+", " ", text))


class NGrams:
    """An n-gram model, trained on a text. The same seed gives the same continuation."""

    def __init__(self, text):
        self.following = defaultdict(Counter)
        tokens = tokens_of(text)
        for end, token in enumerate(tokens):
            for length in range(min(LONGEST, end) + 1):
                self.following[tuple(tokens[end - length : end])][token] += 1

    def next_token(self, tokens, generator):
        """Chooses the next token by the longest context that occurs in the text."""
        for length in range(min(LONGEST, len(tokens)), -1, -1):
            found = self.following.get(tuple(tokens[len(tokens) - length :]))
            if found:
                return generator.choices(list(found), weights=list(found.values()))[0]
        return ""

    def generate(self, prompt, seed):
        """Yields tokens without end."""
        generator = random.Random(seed)
        tokens = tokens_of(" " + prompt)
        while True:
            token = self.next_token(tokens, generator)
            tokens.append(token)
            yield token
