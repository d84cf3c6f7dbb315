"""Decides which parameter goes into which bucket, and keeps the flat memory of each."""
