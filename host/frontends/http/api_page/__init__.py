"""A web page to try the models of a server, and the OpenAPI document that it reads."""
