"""An index that is small in memory and refined from disk, beside partitions that are loaded: the suite doll-disk-index."""
