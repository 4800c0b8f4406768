"""Requests a second that the proxy forwards."""
