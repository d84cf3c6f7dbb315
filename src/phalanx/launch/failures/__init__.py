"""Carries what a failed worker says from its process to the report that a person reads."""
