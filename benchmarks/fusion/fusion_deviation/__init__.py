"""Deviation of reused KV from full attention's: suite fusion-deviation."""
