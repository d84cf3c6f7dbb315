"""What changing the imports of a program means: the table, and a module made of a program's text with it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

# torch's module: ours. The only change that is made to a program.
IMPORTS = {
    "torch.distributed.tensor": "phalanx.tensor",
    "torch.distributed.device_mesh": "phalanx.comm",
    "torch.distributed._shard": "phalanx.shard",
    "torch.distributed.fsdp": "phalanx.fsdp",
    "torch.nn.parallel": "phalanx.ddp",
    "torch.distributed.algorithms.join": "phalanx.ddp",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks": "phalanx.ddp.hooks.default",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook": "phalanx.ddp.hooks.post_local_sgd",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook": "phalanx.ddp.hooks.powersgd",
    "torch.utils.data.distributed": "phalanx.data.torch_names",
}


def with_our_imports(text: str) -> str:
    """
    >>> with_our_imports("from torch.distributed.tensor.parallel import api; import torch.distributed as dist")
    'from phalanx.tensor.parallel import api; import torch.distributed as dist'
    """
    for theirs, ours in IMPORTS.items():
        text = re.sub(rf"\b(from|import) {re.escape(theirs)}\b", rf"\1 {ours}", text)
    return text


def load(path: Path, *, ours: bool) -> ModuleType:
    """The program in ``path`` as a module: as it is, or with our imports."""
    text = path.read_text()
    changed = with_our_imports(text) if ours else text
    module = ModuleType(f"{path.stem}_{'ours' if ours else 'torchs'}")
    exec(compile(changed, str(path), "exec"), module.__dict__)
    return module
