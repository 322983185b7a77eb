"""`pbhost check`: finds problems of models without starting them."""
