"""Lets torch's own tools work on our groups and tensors: a c10d backend, checkpoints, state dicts."""
