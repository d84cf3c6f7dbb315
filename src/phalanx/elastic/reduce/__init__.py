"""Sums the gradients of all slots in one fixed binary tree, inside a worker and across workers."""
