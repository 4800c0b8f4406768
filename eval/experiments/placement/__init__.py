"""Where documents stand in a prompt, and what stands in front of each."""
