"""The backend `tensorflow`: saved models and frozen graphs."""
