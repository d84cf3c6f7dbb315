"""Finds workers that make no progress, and writes what all of them were doing."""
