"""Reads the command lines of ``phalanx run``, ``phalanx scale`` and ``phalanx doctor``."""
