"""Load on the proxy."""
