"""Runs N ranks in the threads of one process, taking turns."""
