"""Starts, watches and stops the worker processes of a node, from the fork to the first line of the user's code."""
