"""The server's log: its line formats, its handler and its settings."""
