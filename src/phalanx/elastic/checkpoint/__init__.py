"""Captures, sends, saves and loads the state of a job."""
