"""Tells which peer is gone, late or in another collective, from processes, sockets and errors."""
