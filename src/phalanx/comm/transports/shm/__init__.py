"""Moves tensors among processes of one host at memory speed; ``_transport.ShmTransport.create`` makes a transport.

Read in this order: ``_segment_layout`` (what lies where, which flag means what), ``_syscalls`` (memory ordering),
``_engine`` (who runs what, waiting), ``_window`` and ``_collectives`` (how bytes move), ``_segment_join`` (how a group
forms).
"""
