"""Charts of what came out."""

from personafl.report.chart import Chart, Series, write_chart

__all__ = ["Chart", "Series", "write_chart"]
