"""Orders and plans of requests in files."""
