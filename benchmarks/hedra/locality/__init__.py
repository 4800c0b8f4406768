"""Locality of a request's successive searches: suite hedra-locality."""
