"""Writes a listing of every source file: a static page each, with an anchor per line (``#L12``), that needs no server.

So the reference can point at the line that it describes, in the very version that it describes, without a network.
"""

from __future__ import annotations

import html
import io
import keyword
import tokenize
from collections.abc import Iterator

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --back: #fff; --text: #222; --quiet: #777; --key: #8839ef; --string: #2a7a2a; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --back: #1e2129; --text: #ddd; --quiet: #8a8f98; --key: #c4a7f5; --string: #8fce8f; }} }}
body {{ background: var(--back); color: var(--text); font: 13px/1.5 ui-monospace, monospace; margin: 1rem; }}
a {{ color: inherit; text-decoration: none; }} header a {{ text-decoration: underline; }}
pre {{ margin: 0; white-space: pre-wrap; }} .n {{ color: var(--quiet); user-select: none; }}
.c {{ color: var(--quiet); }} .k {{ color: var(--key); }} .s {{ color: var(--string); }}
:target {{ background: #ffe58055; }}
</style></head><body><header><p><a href="{home}">Phalanx</a> / {title}</p></header><pre>
{lines}
</pre></body></html>
"""


def page(title: str, text: str, home: str) -> str:
    """The listing of a file; ``home`` leads to the first page of the site."""
    lines = [
        f'<span id="L{number}"><a class="n" href="#L{number}">{number:5d}</a>  {line}</span>'
        for number, line in enumerate(highlighted(text), 1)
    ]
    return PAGE.format(title=html.escape(title), home=home, lines="\n".join(lines))


def highlighted(text: str) -> Iterator[str]:
    """Lines as HTML, with comments, strings and keywords marked.

    >>> list(highlighted("if x:  # why"))
    ['<span class="k">if</span> x:  <span class="c"># why</span>']
    """
    marks: dict[int, list[tuple[int, int, str]]] = {}
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = _class_of(token)
        (first, start), (last, end) = token.start, token.end
        for row in range(first, last + 1) if kind else ():
            stop = end if row == last else len(lines[row - 1])
            marks.setdefault(row, []).append((start if row == first else 0, stop, kind))
    for row, line in enumerate(lines, 1):
        out, at = [], 0
        for start, stop, kind in marks.get(row, ()):
            out.append(html.escape(line[at:start], quote=False))
            out.append(f'<span class="{kind}">{html.escape(line[start:stop], quote=False)}</span>')
            at = stop
        yield "".join([*out, html.escape(line[at:], quote=False)])


def _class_of(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.COMMENT:
        return "c"
    if token.type == tokenize.STRING:
        return "s"
    return "k" if token.type == tokenize.NAME and keyword.iskeyword(token.string) else ""
