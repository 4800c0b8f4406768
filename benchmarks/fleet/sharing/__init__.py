"""Processes in front of one engine that share their orders: suite shared-orders."""
