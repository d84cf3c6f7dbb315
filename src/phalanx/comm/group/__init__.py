"""Gives callers the group of ranks and its collectives: checks, events, the current group."""
