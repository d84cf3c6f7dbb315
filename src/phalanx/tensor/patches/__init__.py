"""Patches: everything that this package changes in torch from outside, and which handler a torch function gets."""
