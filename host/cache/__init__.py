"""The response cache: its keys, its stores, and its use by models."""
