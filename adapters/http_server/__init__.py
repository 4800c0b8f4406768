"""Parts of the proxy's and the embedded engine's servers."""
