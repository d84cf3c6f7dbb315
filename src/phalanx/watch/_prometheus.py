"""Writes the metrics of a job in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.watch._metrics import Labels, MetricFamily, families
from phalanx.watch._view import JobView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(view: JobView, now: float) -> str:
    """Return all metrics of a job."""
    return "".join(f"{line}\n" for family in families(view, now) for line in _lines(family))


def _lines(family: MetricFamily) -> Iterable[str]:
    name = family.name
    yield f"# HELP {name} {family.text}"
    yield f"# TYPE {name} {family.kind}"
    for labels, value in family.samples:
        yield f"{name}{_labelled(labels)} {value}"
    if family.histogram is not None:
        for bound, count in family.histogram.cumulative():
            yield f"{name}_bucket{_labelled({**family.labels, 'le': bound})} {count}"
        yield f"{name}_sum{_labelled(family.labels)} {family.histogram.total}"
        yield f"{name}_count{_labelled(family.labels)} {family.histogram.num}"


def _labelled(labels: Labels) -> str:
    """
    >>> _labelled({"job": "a", "rank": 3})
    '{job="a",rank="3"}'
    """
    pairs = (f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
