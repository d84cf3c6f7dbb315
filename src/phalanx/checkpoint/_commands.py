"""Reads the command lines of ``phalanx inspect`` and ``phalanx export``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from phalanx.checkpoint._export import FORMATS, export
from phalanx.checkpoint._inspect import in_units, inspect
from phalanx.shard import CheckpointError
from phalanx.storage import StorageError

REFUSED = (CheckpointError, StorageError, ValueError, ModuleNotFoundError)
"""What is said in one line: the last two of a URL that we do not know, or without the package for it."""
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}


def inspect_main(argv: Sequence[str]) -> int:
    """Run ``phalanx inspect``; the exit code."""
    parser = argparse.ArgumentParser(prog="phalanx inspect", description="Show what a checkpoint holds.")
    parser.add_argument("path", help="a job's saves, or a checkpoint of ours, Hugging Face's, DCP's or torch.save's")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    try:
        contents = inspect(options.path)
    except REFUSED as error:
        return _refused(error)
    print(json.dumps({**asdict(contents), "num_bytes": contents.num_bytes}) if options.json else contents)
    return 0


def export_main(argv: Sequence[str]) -> int:
    """Run ``phalanx export``; the exit code."""
    parser = argparse.ArgumentParser(prog="phalanx export", description="Write a checkpoint in another format.")
    parser.add_argument("source", help="a job's saves, or a checkpoint of ours, Hugging Face's, DCP's or torch.save's")
    parser.add_argument("target", help="the folder (hf, dcp) or file (torch) to write")
    parser.add_argument("--format", choices=sorted(FORMATS), default="hf", help="default: %(default)s")
    parser.add_argument("--names", metavar="PATTERN", help="only tensors whose names fit, such as 'encoder.*'")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="cast floating-point tensors")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")
    options = parser.parse_args(argv)
    try:
        names = export(
            options.source,
            options.target,
            format=options.format,
            names=options.names,
            dtype=None if options.dtype is None else DTYPES[options.dtype],
            overwrite=options.overwrite,
        )
        written = inspect(options.target)
    except REFUSED as error:
        return _refused(error)
    if options.json:
        print(json.dumps({"path": written.path, "format": written.format, "tensors": names}))
    else:
        print(f"wrote {len(names)} tensors, {in_units(written.num_bytes)}, to {written.path} ({written.format})")
    return 0


def _refused(error: Exception) -> int:
    print(f"phalanx: {error}", file=sys.stderr)
    return 1
