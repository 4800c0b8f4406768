"""Cached tokens of conversations that replay what they sent."""
