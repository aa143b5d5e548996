"""The tables that the command line prints: of results, of exported models, of networks that fit, of a network."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from personafl.core.algorithm import Problem
from personafl.exports.export import Exported, ExportedModel
from personafl.exports.fit import Candidate, Fit
from personafl.exports.memory import Memory
from personafl.report.measure import metric_names
from personafl.report.picking import TITLES, Picked
from personafl.report.table import MODELS, amount, grid, has_words, legend, lines, mean, percent, plain, titled, titles

Row = dict[str, Any]
# titles of columns that are no numbers
_TEXT = ("method", "model", "form", "tensor", "shape", "part", "fits", "picked", "best on test")


def result_tables(
    rows: Sequence[Row],
    width: int,
    failed: Sequence[tuple[str, str]] = (),
    found: str = "",
    picked: Picked | None = None,
) -> Iterator[RenderableType]:
    """Yield a table per group of clients, methods × models with mean ± std over seeds, that fits `width`; a legend.

    `failed` are runs without a result and why: lines of the first table. `found` is what they show, in a sentence.
    `picked` has a table of its own: what validation data pick.
    """
    for title, part in titled(rows):
        yield Text(title, style="bold")
        yield _fitting(part, width)
        yield from _failed_lines(failed)
        failed = ()
        yield ""
    yield from _failed_lines(failed)
    if found:
        yield Text(f"{found}\n", style="bold")
    if picked is not None:
        table = _empty_table(1, *TITLES)
        for line in picked.lines():
            table.add_row(*line)
        yield from (table, "", Text(f"{picked}\n", style="bold"))
    if rows:
        yield Text("\n".join(f"{column}: {words}" for column, words in legend(rows)), style="dim")


def detail_tables(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """Yield a table per group of clients with a line for every method × model: what the short table leaves out."""
    for title, part in titled(rows):
        yield Text(title, style="bold")
        yield _details(part)
        yield ""
    if rows:
        yield Text(
            "mean: of clients; weighted: by their samples; std: between clients\n"
            "worst 10%: mean of the worst decile of clients\n"
            "hurt: % of clients worse off than with the global model, its 95% interval,\n"
            "      and by how many points they are on average",
            style="dim",
        )


def model_tables(problem: Problem, memory: Memory) -> Iterator[RenderableType]:
    """Yield which tensors are personal and how many parameters that is, and what training needs of memory."""
    split = problem.split
    table = _empty_table(2, "tensor", "shape", "parameters", "part")
    for name, shape in problem.net.shapes.items():
        part = "personal" if split is not None and split.is_personal(name) else "shared"
        table.add_row(name, "×".join(map(str, shape)) or "1", f"{shape.numel():,}", part)
    yield table
    whole = problem.net.parameters
    own = sum(s.numel() for n, s in problem.net.shapes.items() if split is not None and split.is_personal(n))
    yield Text(f"\npersonal: {own:,} of {whole:,} parameters ({100 * own / whole:.1f}%)", style="bold")
    yield Text("\nMemory of one client's training, by 3·size(u) + 2·size(v) + backprop (Pillutla et al. 2022):")
    rows = [
        ("no personal part", memory.none),
        ("this personal part", memory.partial),
        ("a whole personal model", memory.full),
    ]
    for name, size in rows:
        yield Text(f"  {name:<24}{size / 1e6:8.1f} MB")
    yield Text(f"  {'saving against whole':<24}{100 * memory.saving:7.1f}%")
    yield Text(f"Measured for this method: {memory.measured / 1e6:.1f} MB at the peak of two steps")


def export_tables(exported: Exported) -> Iterator[RenderableType]:
    """Yield what was written: the global model and the mean of the clients' ones, dense and as exported; a legend."""
    timed = next((model.latency for model in exported.models if model.latency is not None), None)
    titles = ["accuracy\n%", "parameters", "bits", "kB on\ndisk", "% of\nFP32", "multiply-\nadds"]
    table = _empty_table(2 if timed is None else 1, "model", "form", *titles, *(["ms"] if timed else []))
    for shared in (True, False):
        group = [model for model in exported.models if (model.client is None) == shared]
        for form in ("dense", "exported") if group else ():
            table.add_row(*_export_line(group, form, timed is not None))
        if group and group[0].onnx is not None:
            table.add_row("", "onnx", "", "", "", *_export_size(group, "bytes_onnx"))
    yield table
    yield Text("\ndense: the same model with all its weights whole; FP32: that in single precision", style="dim")
    if any(model.bits for model in exported.models):
        yield Text("bits: of a weight in the quantized layers; the others are in full precision", style="dim")
    if len(exported.models) > 2:
        yield Text("clients: means over their models", style="dim")
    yield Text("multiply-adds: for one sample, in the network that personafl.load_model makes", style="dim")
    if timed:
        threads = f"{timed.threads} thread{'s' if timed.threads > 1 else ''}"
        one = ", one client" if len(exported.models) > 2 else ""
        yield Text(f"ms: median for a batch of {timed.batch} on this machine's CPU, {threads}{one}", style="dim")


def _export_line(models: Sequence[ExportedModel], form: str, timed: bool) -> Iterator[str]:
    suffix, first = "_dense" if form == "dense" else "", models[0]
    kinds = " or ".join(name for name in MODELS if any(model.model == name for model in models))
    whose = f"{len(models)} clients" if len(models) > 1 else f"client {first.client}"
    known = [model.test_accuracy for model in models if model.test_accuracy is not None]
    yield kinds if suffix else "" if first.client is None else whose
    yield form
    yield "" if suffix else f"{100 * statistics.mean(known):.1f}" if known else "–"
    yield f"{statistics.mean(getattr(model, f'parameters{suffix}') for model in models):,.0f}"
    widths = sorted({model.bits or 0 for model in models})
    yield "full" if suffix else ", ".join(str(bits or "full") for bits in widths)
    yield from _export_size(models, f"bytes{suffix}")
    yield f"{statistics.mean(getattr(model, f'multiply_adds{suffix}') for model in models):,.0f}"
    if timed:
        spent = first.latency
        yield "–" if spent is None else amount(spent.dense_ms if suffix else spent.exported_ms)


def _export_size(models: Sequence[ExportedModel], key: str) -> tuple[str, str]:
    """Return the mean size of files in kB, and its share of what they would take in single precision."""
    size, whole = (statistics.mean(getattr(model, name) for model in models) for name in (key, "bytes_fp32"))
    return amount(size / 1e3), f"{100 * size / whole:.1f}"


def fit_tables(found: Fit) -> Iterator[RenderableType]:
    """Yield the networks that were looked at, with the chosen one marked; a legend; and its entry for a recipe."""
    limited = found.limits.memory is not None
    memory = ["bytes to\ntrain", "% of\nlimit"] if limited else []
    table = _empty_table(2, "model", "parameters", "bits", "bytes\nstored", "% of\nlimit", *memory, "fits")
    for candidate in found.candidates:
        style = "bold" if candidate is found.chosen else "" if candidate.fits(found.limits) else "dim"
        table.add_row(*_fit_line(candidate, found), style=style)
    yield table
    yield Text(f"\nbytes stored: a client's own model, packed as {found.method} does, header included", style="dim")
    if limited:
        yield Text("bytes to train: at the peak of two steps, for the client with most samples", style="dim")
    yield Text("full: full precision; 1 bit costs accuracy and is chosen only if --bits has it", style="dim")
    yield Text(f"\nThe largest that fits, for a recipe with {found.method}:\n")
    yield Text(found.chosen.to_toml(), no_wrap=True, overflow="ignore")  # a line cut in two is no TOML


def _fit_line(candidate: Candidate, found: Fit) -> Iterator[str]:
    yield candidate.label
    yield f"{candidate.parameters:,}"
    yield "full" if candidate.bits is None else str(candidate.bits)
    yield f"{candidate.bytes:,}"
    yield amount(100 * candidate.bytes / found.limits.bytes)
    if found.limits.memory is not None:
        known = candidate.memory
        yield "–" if known is None else f"{known:,}"
        yield "–" if known is None else amount(100 * known / found.limits.memory)
    yield "chosen" if candidate is found.chosen else "yes" if candidate.fits(found.limits) else "no"


def _fitting(rows: Sequence[Row], width: int) -> Table:
    """Return the table in the widest layout that fits; in the narrowest, ± has lines of its own."""
    wide = Console(width=1000)
    for padding, joint in ((1, "±"), (0, "±"), (0, "\n±")):
        table = _table(rows, padding, joint)
        if Measurement.get(wide, wide.options, table).maximum <= width:
            break
    return table


def _failed_lines(failed: Sequence[tuple[str, str]]) -> Iterator[RenderableType]:
    """Yield what stands in place of numbers: a table of its own, for no cell is as wide as a reason."""
    if failed:
        table = Table.grid(padding=(0, 2))
        for name, words in failed:
            table.add_row(name, Text(words, "red"))
        yield table


def _empty_table(padding: int, *titles: str) -> Table:
    return grid(*titles, texts=_TEXT, padding=padding, vertical="bottom", overflow="fold")


def _table(rows: Sequence[Row], padding: int, joint: str) -> Table:
    table = _empty_table(padding, *titles(rows))
    for line in lines(rows, joint):
        table.add_row(*(Text(cell, "bold" if at in line.best else "") for at, cell in enumerate(line.cells)))
    return table


def _details(rows: Sequence[Row]) -> Table:
    spoken = ["WER", "WER,\nweighted"] if has_words(rows) else []
    further = metric_names(rows)
    whole = [
        "mean",
        "weigh-\nted",
        "std",
        "worst\n10%",
        "median",
        *spoken,
        *further,
        "hurt",
        "95%",
        "by",
        "parame-\nters",
    ]
    table = _empty_table(0, "method", "model", *whole)
    ordered = sorted(rows, key=lambda row: MODELS.index(row["model"]))
    names = list(dict.fromkeys(row["method"] for row in rows))
    pairs = dict.fromkeys((row["method"], row["model"]) for row in ordered)
    for name, model in sorted(pairs, key=lambda pair: names.index(pair[0])):
        part = [row for row in rows if (row["method"], row["model"]) == (name, model)]
        medians = [{"median": row["quantiles"]["0.50"]} for row in part]
        low, high = percent(part, "share_hurt_low"), percent(part, "share_hurt_high")
        table.add_row(
            name,
            model,
            *(percent(part, key) for key in ("accuracy", "accuracy_weighted", "accuracy_std", "worst_decile")),
            percent(medians, "median"),
            *(percent(part, key) for key in ("word_error", "word_error_weighted") if spoken),
            *(plain(part, key, "±") for key in further),
            percent(part, "share_hurt"),
            "–" if low == "–" else f"{low}–{high}",
            percent(part, "hurt_mean_loss"),
            f"{mean(part, 'parameters', 0.0):,.0f}",
        )
    return table
