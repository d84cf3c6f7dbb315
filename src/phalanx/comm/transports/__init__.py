"""Carries bytes between the ranks of one group: one interface, c10d, shared memory, two levels, and who chooses."""
