"""Moves boxes between the ranks of a group: planned copies, gathering, resharding."""
