"""Responses that are kept, so that the same request need not be run again."""
