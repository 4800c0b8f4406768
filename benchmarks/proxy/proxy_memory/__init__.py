"""The memory of a proxy under attack."""
