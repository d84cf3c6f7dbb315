"""Decides what becomes of a generation that something happened to, and agrees on it with the other agents."""
