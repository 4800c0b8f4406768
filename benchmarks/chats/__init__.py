"""Conversations and clouds."""
