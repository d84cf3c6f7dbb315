"""Defines ShardedTensor and the specs that shard it: making, distributing, pickling."""
