"""Schedulers: which call runs on which instance, and when."""
