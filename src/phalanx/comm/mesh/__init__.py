"""Lays the ranks of a group out on named axes, with one group per axis."""
