"""Finds the other workers of a job, forms the next group after a change, and brings its workers to one state."""
