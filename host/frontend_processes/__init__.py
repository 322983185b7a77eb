"""Frontends in processes of their own: they speak to clients, and to the core through rings."""
