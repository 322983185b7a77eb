"""The page that shows a server's models, and the OpenAPI document that it reads."""
