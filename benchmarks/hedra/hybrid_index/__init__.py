"""Index clusters in two tiers: suite hedra-index."""
