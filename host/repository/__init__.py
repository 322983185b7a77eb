"""Model repositories on disk: models, versions, files, fingerprints, and overrides of clients."""
