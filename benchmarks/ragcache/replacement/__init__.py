"""Replacement policies on simulated tiers (RAGCache 7.3 and 7.4), and scheduling times (7.5)."""
