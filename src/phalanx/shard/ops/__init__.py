"""Runs torch functions on sharded tensors: shard by shard, as DTensors, or by a registered function."""
