"""Runs a node's part of a job: joins the rendezvous, keeps its workers, applies what was decided."""
