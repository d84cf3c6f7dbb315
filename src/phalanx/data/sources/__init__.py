"""Sources of shards: tar files (WebDataset), MDS, Parquet, litdata, and streams of Hugging Face by their files.

Each gives any sample of any shard, for ``phalanx.data.ShardedDataset``. What a format needs beyond numpy is imported
when a source of it is made.
"""

from __future__ import annotations

from phalanx.data.sources._huggingface import from_huggingface
from phalanx.data.sources._litdata_source import LitDataSource
from phalanx.data.sources._mds_source import MDSSource
from phalanx.data.sources._node_cache import NodeCache
from phalanx.data.sources._parquet_source import ParquetSource
from phalanx.data.sources._tar_source import TarSource

__all__ = ["LitDataSource", "MDSSource", "NodeCache", "ParquetSource", "TarSource", "from_huggingface"]
