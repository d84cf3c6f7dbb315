"""Saves and loads sharded state: any layout from any other."""
