"""Where data come from: names, files, folders and the Hugging Face hub."""

from personafl.data.sources.dataset import Dataset
from personafl.data.sources.registry import SOURCES, Source, load_dataset

__all__ = ["SOURCES", "Dataset", "Source", "load_dataset"]
