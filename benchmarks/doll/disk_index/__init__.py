"""An index that is small in memory and refined from disk, beside partitions: the suite doll-disk-index."""
