"""Gives the page: one HTML file without anything from elsewhere, live from a server or with a job's data inside.

Owns the policy that goes with it: only the script and the style of this file may run, and only its own server may be
asked. Data inside the file is JSON that is never run and in which nothing can end the element that it stands in.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

_POLICY = "<!-- policy -->"
_DATA = "<!-- data -->"


@functools.cache
def _source() -> str:
    return files("phalanx.watch").joinpath("page.html").read_text(encoding="utf-8")


@functools.cache
def page_policy() -> str:
    """Return the content security policy of the page."""
    text = _source()
    scripts = [_hash(body) for body in re.findall(r"<script>(.*?)</script>", text, re.DOTALL)]
    styles = [_hash(body) for body in re.findall(r"<style>(.*?)</style>", text, re.DOTALL)]
    return (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src {' '.join(styles)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(body: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"


def page_html(data: dict[str, Any] | None = None) -> str:
    """Return the page; with ``data`` (of ``JobView.page``) it shows that and asks nobody."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{page_policy()}">'
    inside = "" if data is None else f'<script type="application/json" id="data">{embedded(data)}</script>'
    return _source().replace(_POLICY, policy, 1).replace(_DATA, inside, 1)


def embedded(data: Any) -> str:
    """Return JSON in which no text can end a script element or begin another.

    >>> embedded({"text": "</script><script>"})
    '{"text":"\\\\u003c/script\\\\u003e\\\\u003cscript\\\\u003e"}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
