"""Several proxy processes in front of one engine."""
