"""Fakes, contracts and tools of the tests: `tests` is on the path of every test (pyproject.toml)."""
