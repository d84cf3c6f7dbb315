"""Asks the operating system of a node: processes, addresses, signals, folders."""
