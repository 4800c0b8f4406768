"""Orders shared by processes in front of one engine, through a log in Valkey or Redis."""

from ragorder.adapters.shared_orders.orderer import SharedOrderer

__all__ = ["SharedOrderer"]
