"""Sharding rules: pure functions from a call to the layouts that need no communication, by family."""
