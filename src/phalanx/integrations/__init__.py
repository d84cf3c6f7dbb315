"""Lets other tools and Phalanx work together: one module for each kind, none of which is imported by anything here."""
