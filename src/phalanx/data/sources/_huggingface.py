"""Finds the files behind a streaming dataset of Hugging Face, so that they are read as shards.

Map-style datasets of ``datasets`` need nothing: samplers and jobs take them as they are. A streaming one cannot be
entered in the middle exactly; its files can. Whatever was done to the stream (map, filter, shuffle, take, cast) is
refused: it belongs into ``transform`` and the sampler. Tried with release 5.2 of ``datasets``.
"""

from __future__ import annotations

from typing import Any

from phalanx.data.sources._parquet_source import ParquetSource

CHANGES = ("_distributed", "_formatting")
"""What a stream keeps of what was done to it."""
CHANGES_OF_SOME = ("_shuffling", "_starting_state_dict")
"""What it keeps of that in some releases only."""


def from_huggingface(dataset: Any, **options: Any) -> ParquetSource:
    """Return a source of the Parquet files that a streaming dataset reads; ``options`` are those of ``ParquetSource``.

    >>> stream = load_dataset("parquet", data_files="*.parquet", streaming=True, split="train")  # doctest: +SKIP
    >>> source = from_huggingface(stream, columns=["text"])                                      # doctest: +SKIP
    """
    kind = type(dataset).__name__
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        raise TypeError(f"{kind} is map-style: give it to the sampler or job as it is")
    missing = [name for name in ("_ex_iterable", *CHANGES) if not hasattr(dataset, name)]
    if missing and type(dataset).__module__.partition(".")[0] == "datasets":
        raise TypeError(
            f"{kind} of the installed release of datasets has no {', '.join(missing)}, by which Phalanx sees what it "
            "reads; give its files to ParquetSource, and report this"
        )
    if missing:
        raise TypeError(f"{kind} is no streaming dataset of the package datasets")
    examples = dataset._ex_iterable
    builder = getattr(getattr(examples, "generate_tables_fn", None), "__self__", None)
    config, given = getattr(builder, "config", None), getattr(getattr(builder, "info", None), "features", None)
    kwargs = getattr(examples, "kwargs", {})
    changed = [name for name in (*CHANGES, *CHANGES_OF_SOME) if getattr(dataset, name, None) is not None]
    if dataset.features != given or getattr(config, "features", None) is not None:
        changed.append("features")
    done = type(examples).__name__
    if changed or done not in ("ArrowExamplesIterable", "ExamplesIterable"):
        raise ValueError(
            f"the stream was changed ({', '.join(changed) or done}), which its files do not show; pass the dataset as "
            "load_dataset gave it, do the same in ShardedDataset(transform=) and leave order and shares to the sampler"
        )
    files = [str(file) for file in kwargs.get("files", ())]
    if not files or not all(file.endswith(".parquet") for file in files):
        raise ValueError(f"{kind} reads {files[:3] or 'no files that it names'}; expected Parquet files")
    if any(groups is not None for groups in kwargs.get("row_groups_list") or ()):
        raise ValueError("the stream was changed (reshard): it reads parts of files; ParquetSource reads all of each")
    if getattr(config, "filters", None) is not None:
        raise ValueError("the stream filters rows while it reads, so its files hold more; filter beforehand")
    return ParquetSource(files, **{"columns": getattr(config, "columns", None), **options})
