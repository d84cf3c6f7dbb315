"""Describes which box of a tensor lies where: boxes, placements, metadata; values only."""
