"""Recordings of requests and responses with their tensors: made by a server, kept in a folder."""
