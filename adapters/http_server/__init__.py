"""The parts of an HTTP server that the proxy and the embedded engine's server share."""
