"""The four papers as data: their printed numbers, the recipes that repeat them, and what they claim."""

from personafl.papers.catalog import Paper, Size, Table, find, papers
from personafl.papers.preset import Preset, presets
from personafl.papers.verdict import Outcome, Verdict, judge, outcomes

__all__ = ["Outcome", "Paper", "Preset", "Size", "Table", "Verdict", "find", "judge", "outcomes", "papers", "presets"]
