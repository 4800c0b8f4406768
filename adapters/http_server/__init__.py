"""Parts of an HTTP server that the proxy and the embedded engine share."""
