"""What a live vLLM server tells: its cache's size and block size, and its KV events."""
