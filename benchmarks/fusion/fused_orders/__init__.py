"""Tokens that fused requests compute, by the order of their documents: suite fusion-orders."""
