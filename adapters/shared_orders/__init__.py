"""Orders shared by several processes of one engine, through Valkey or Redis."""

from ragorder.adapters.shared_orders.orderer import SharedOrderer

__all__ = ["SharedOrderer"]
