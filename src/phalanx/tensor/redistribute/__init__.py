"""Redistribution: which collectives turn one layout into another, and running them differentiably."""
