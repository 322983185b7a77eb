"""Python environments of models: finds, unpacks, builds and checks them."""
