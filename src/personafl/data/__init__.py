"""Data for federated learning: sources, partitions, and the federated data set they make."""

from personafl.data.build import federate, load
from personafl.data.config import DataConfig, parse_partition
from personafl.data.describe import describe
from personafl.data.federated import FederatedData, Ragged
from personafl.data.sources import SOURCES, Dataset, Source, TextOptions, load_dataset

__all__ = [
    "SOURCES",
    "DataConfig",
    "Dataset",
    "FederatedData",
    "Ragged",
    "Source",
    "TextOptions",
    "describe",
    "federate",
    "load",
    "load_dataset",
    "parse_partition",
]
