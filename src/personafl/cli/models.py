"""The commands about models: export, fit, model describe."""

from pathlib import Path
from typing import Annotated

import typer

from personafl.cli.console import err, out, print_found, say
from personafl.cli.options import Dataset, Json, Label, Model, PartitionText, Quiet, User, Words, parsed
from personafl.errors import BadInput


def export(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")],
    clients: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="NAME", help="Also this client's last personal model; may be repeated."),
    ] = None,
    all_clients: Annotated[bool, typer.Option("--all-clients", metavar="", help="Also those of all clients.")] = False,
    out_path: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to; if not given, RUN/export.")
    ] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", metavar="", help="Also as .onnx, which onnxruntime runs on its own.")
    ] = False,
    peft: Annotated[
        bool, typer.Option("--peft", metavar="", help="Also as a folder that peft loads, of LoRA adapters.")
    ] = False,
    latency: Annotated[
        bool, typer.Option("--latency", metavar="", help="Measure how fast the models are on this machine.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, max=10**6, metavar="N", help="Samples at a time for --latency.")] = 20,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write the global model of a run for devices, in its most compact form; personafl.load_model(FILE) reads it."""
    from personafl.api.display import Display
    from personafl.cli.tables import export_tables
    from personafl.exports.export import export as write

    if clients and all_clients:
        raise BadInput("--client and --all-clients: give one of them")
    with Display(err, quiet or as_json).count("models written") as listener:
        exported = write(
            path,
            out_path,
            "all" if all_clients else clients or None,
            onnx=onnx,
            peft=peft,
            batch=batch if latency else None,
            listener=listener,
        )
    print_found(exported.to_json(), export_tables(exported), as_json)
    if not as_json:
        say(f"models: {exported.path}")


def fit(
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Room for a client's own model: 100k, 1.5M, 64Ki, or bytes.")
    ],
    words: Words = None,
    dataset: Dataset = None,
    label: Label = None,
    user: User = None,
    partition: PartitionText = None,
    max_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Also: memory to train it in, with the recipe's batch.")
    ] = None,
    names: Annotated[
        str | None,
        typer.Option("--models", metavar="NAMES", help="As in cnn1,mlp:hidden=[16]; if not given, all that suit."),
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option(
            "--bits",
            metavar="NUMBERS",
            help="As in full,4,1; if not given, full,8,4,3,2. 1 bit costs accuracy: it is chosen only if named here.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the largest network and its bits per weight that fit on a device, for the devices of a recipe."""
    from personafl.cli.tables import fit_tables
    from personafl.exports.fit import Limits, parse_bits, parse_models, parse_size
    from personafl.exports.fit import fit as find

    memory = None if max_memory is None else parse_size(max_memory, "--max-memory")
    limits = Limits(bytes=parse_size(max_bytes, "--max-bytes"), memory=memory)
    models = None if names is None else parse_models(names)
    bits = None if widths is None else parse_bits(widths)
    found = find(parsed(words, dataset, label, user, partition), limits, models, bits)
    print_found(found.to_json(), fit_tables(found), as_json)


def describe(
    words: Words = None,
    dataset: Dataset = None,
    label: Label = None,
    user: User = None,
    partition: PartitionText = None,
    model: Model = None,
) -> None:
    """Print which tensors are personal, and what memory a client's training needs; set model.personal=output, …"""
    from personafl.cli.tables import model_tables
    from personafl.exports.memory import training_memory
    from personafl.runs.build import prepare

    recipe = parsed(words, dataset, label, user, partition, model)
    job = prepare(recipe)
    for part in model_tables(job.federation.problems[0], training_memory(job)):
        out.print(part)
