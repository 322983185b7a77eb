"""Programs of other OpenAI clients, which run in environments of their own."""
