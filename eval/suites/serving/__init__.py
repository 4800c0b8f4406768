"""Policies compared on one engine, request by request."""
