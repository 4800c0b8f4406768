"""Workflows on real parts, in real time: suite hedra-live."""
