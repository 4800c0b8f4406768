"""Cached tokens by the place of documents in a prompt, and by what each has in front of it."""
