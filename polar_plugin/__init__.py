"""Train a model through any agent program, unmodified: exact tokens, exact context, fair rewards."""
