"""The proxy's cost."""
