"""The OpenAI-compatible routes under /v1, over the models of the core."""
