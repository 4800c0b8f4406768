"""Costs of prompts at clouds, whose caches resume at marks alone: suites clouds and clouds-nothing-shared."""
