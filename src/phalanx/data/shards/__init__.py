"""Datasets of shards: their table, the local order over them, readers, mixing, packing, and replayed iterators."""
