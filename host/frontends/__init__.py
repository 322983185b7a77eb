"""The protocols that clients speak, translated to and from calls of the core."""
