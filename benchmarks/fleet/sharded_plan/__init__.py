"""Plans of large batches in shards: suite sharded-plan."""
