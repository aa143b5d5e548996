"""Data for federated learning: sources, partitions, and the federated data set they make."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from personafl.data.build import federate, load
    from personafl.data.config import DataConfig, parse_partition
    from personafl.data.federated import FederatedData, Ragged
    from personafl.data.sources import Dataset, load_dataset

__all__ = ["DataConfig", "Dataset", "FederatedData", "Ragged", "federate", "load", "load_dataset", "parse_partition"]
_HOMES = {"federate": "build", "load": "build", "FederatedData": "federated", "Ragged": "federated"}
_HOMES |= {"DataConfig": "config", "parse_partition": "config", "Dataset": "sources", "load_dataset": "sources"}


# Loaded at first use: a device whose data were dealt to it needs no source and no partition.
def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'personafl.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"personafl.data.{_HOMES[name]}"), name)
