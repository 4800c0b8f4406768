"""Test tools that are not part of the package: `tests` is on the path of every test (pyproject.toml)."""
