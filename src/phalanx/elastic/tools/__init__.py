"""Writes what happens to a job as lines of JSON and a status line, and makes a report of them."""
