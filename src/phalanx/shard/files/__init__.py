"""Reads and writes the files of a sharded checkpoint: safetensors in place, and the index over them."""
