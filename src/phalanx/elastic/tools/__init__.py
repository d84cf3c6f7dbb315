"""Writes what happens to a job: its events, its audit, the times of its steps, and a status line."""
