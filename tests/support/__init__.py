"""Fakes, contracts and tools that several test files share."""
