"""Model repositories on disk: the models, their versions, their files and what overrides them."""
