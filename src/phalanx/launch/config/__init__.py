"""Holds the values that describe a launch: its configuration, its workers, its result."""
