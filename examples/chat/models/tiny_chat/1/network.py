"""A transformer of two layers over bytes, with random weights and a key-value cache."""

import numpy as np

VOCABULARY = 257
END = 256
CONTEXT = 256
LAYERS, WIDTH, HEADS = 2, 64, 4
HEAD = WIDTH // HEADS


class Cache:
    """The keys and values of one text, shape [layer, position, head, element]."""

    def __init__(self):
        self.keys = np.zeros((LAYERS, CONTEXT, HEADS, HEAD), np.float32)
        self.values = np.zeros_like(self.keys)
        self.length = 0


class Network:
    def __init__(self, seed):
        random = np.random.default_rng(seed)

        def matrix(*shape):
            return (random.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

        self.tokens = matrix(VOCABULARY, WIDTH) * 16
        self.positions = matrix(CONTEXT, WIDTH) * 4
        self.attention = matrix(LAYERS, WIDTH, 3 * WIDTH)
        self.mix = matrix(LAYERS, WIDTH, WIDTH)
        self.grow = matrix(LAYERS, WIDTH, 4 * WIDTH)
        self.shrink = matrix(LAYERS, 4 * WIDTH, WIDTH)
        self.output = matrix(WIDTH, VOCABULARY)

    def step(self, tokens, caches):
        """Add one token to each text; return the scores of the next ones, [text, token].

        The matrices are multiplied once for all texts; only attention looks at each text alone.
        """
        at = [cache.length for cache in caches]
        state = self.tokens[tokens] + self.positions[at]
        for layer in range(LAYERS):
            joined = normalise(state) @ self.attention[layer]
            query, key, value = joined.reshape(len(tokens), 3, HEADS, HEAD).swapaxes(0, 1)
            seen = np.empty((len(tokens), HEADS, HEAD), np.float32)
            for row, cache in enumerate(caches):
                end = cache.length + 1
                cache.keys[layer, at[row]] = key[row]
                cache.values[layer, at[row]] = value[row]
                scores = np.einsum("he,phe->hp", query[row], cache.keys[layer, :end])
                weights = softmax(scores / np.sqrt(HEAD))
                seen[row] = np.einsum("hp,phe->he", weights, cache.values[layer, :end])
            state = state + seen.reshape(len(tokens), WIDTH) @ self.mix[layer]
            state = state + np.maximum(normalise(state) @ self.grow[layer], 0) @ self.shrink[layer]
        for cache in caches:
            cache.length += 1
        return normalise(state) @ self.output


def normalise(state):
    state = state - state.mean(-1, keepdims=True)
    return state / (state.std(-1, keepdims=True) + 1e-5)


def softmax(scores):
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)
