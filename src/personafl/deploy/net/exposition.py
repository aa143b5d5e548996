"""Numbers as text that Prometheus reads: its exposition format, version 0.0.4."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Sample:
    """One number; the labels say of what."""

    value: float
    labels: Mapping[str, object] = field(default_factory=dict)
    suffix: str = ""  # of a histogram


@dataclass(frozen=True)
class Metric:
    """Numbers of one kind: a counter's only grow, a gauge's do as they like."""

    name: str
    kind: str  # counter, gauge or histogram
    help: str
    samples: Sequence[Sample]


def counter(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """Return a counter: one number, or one for each value of a label."""
    return Metric(f"personafl_{name}_total", "counter", text, _samples(value, label))


def gauge(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """Return a gauge: one number, or one for each value of a label."""
    return Metric(f"personafl_{name}", "gauge", text, _samples(value, label))


def info(name: str, text: str, /, **labels: str) -> Metric:
    """Return a gauge that is 1 and has words as its labels."""
    return Metric(f"personafl_{name}_info", "gauge", text, [Sample(1, labels)])


class Histogram:
    """Counts values by upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*bounds, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        place = next(place for place, bound in enumerate(self._bounds) if value <= bound)
        self._counts[place] += 1
        self._sum += value

    def metric(self, name: str, text: str) -> Metric:
        """Return it as it is now."""
        samples, total = [], 0
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            samples.append(Sample(total, {"le": _number(bound)}, "_bucket"))
        return Metric(
            f"personafl_{name}",
            "histogram",
            text,
            [*samples, Sample(self._sum, {}, "_sum"), Sample(total, {}, "_count")],
        )


def rendered(metrics: Iterable[Metric]) -> str:
    """Return a page."""
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {_escaped(metric.help)}", f"# TYPE {metric.name} {metric.kind}"]
        for sample in metric.samples:
            labels = ",".join(f'{key}="{_escaped(str(value), quoted=True)}"' for key, value in sample.labels.items())
            name = f"{metric.name}{sample.suffix}"
            lines.append(f"{name}{f'{{{labels}}}' if labels else ''} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _samples(value: float | Mapping[str, float], label: str) -> list[Sample]:
    if isinstance(value, Mapping):
        return [Sample(one, {label: key}) for key, one in sorted(value.items())]
    return [Sample(value)]


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))
