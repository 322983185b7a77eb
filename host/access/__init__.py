"""Access by API key: who may send which requests, and how many."""
