"""Measurements that answer a user's question."""
