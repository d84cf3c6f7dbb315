"""Wraps a module for training: arguments, forward, buffers, uneven inputs, logging."""
