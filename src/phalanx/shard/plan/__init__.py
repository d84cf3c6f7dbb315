"""Shards modules by plans, chooses plans, and optimizes sharded parameters."""
