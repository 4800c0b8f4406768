"""Costs of prompts at clouds, whose caches resume at marks alone: suites clouds, clouds-nothing-shared and
clouds-conversations."""
