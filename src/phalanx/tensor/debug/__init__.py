"""Seeing what distributed tensors do: who communicates, and who holds what; holding it against a contract."""

from __future__ import annotations

from phalanx.tensor.debug import contracts
from phalanx.tensor.debug._comm_mode import CommDebugMode
from phalanx.tensor.debug._contract import Allowance, CommContract
from phalanx.tensor.debug._enforce import (
    ContractBreach,
    ContractReport,
    ContractWarning,
    check_contract,
    comm_contract,
)
from phalanx.tensor.debug._layout_summary import layout_summary
from phalanx.tensor.debug._picture import sharding_png, sharding_svg
from phalanx.tensor.debug._visualize import visualize_sharding

__all__ = [
    "Allowance",
    "CommContract",
    "CommDebugMode",
    "ContractBreach",
    "ContractReport",
    "ContractWarning",
    "check_contract",
    "comm_contract",
    "contracts",
    "layout_summary",
    "sharding_png",
    "sharding_svg",
    "visualize_sharding",
]
