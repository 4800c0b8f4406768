"""Workflows of searches and generations on a virtual clock: suites hedra-serving, hedra-offline and others."""
