"""Bodies of requests: documents, scope and lengths."""
