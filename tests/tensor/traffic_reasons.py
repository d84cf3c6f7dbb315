"""Reasons."""

from __future__ import annotations


def reason_for(name: str, layout: str) -> str:
    return ""
