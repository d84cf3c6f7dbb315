"""Makes the modules beside the tests importable and keeps torch to one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch._dynamo  # 800 modules: torch would load them inside the first test that differentiates

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
