"""Which part should be personal? A small decoder, trained on some of Shakespeare's plays, for the roles of others.

    python benchmarks/roles.py pretrain PATH/shakespeare_roles.npz --out DIR   # DIR/model and DIR/roles.jsonl
    personafl compare recipes/roles.toml --dataset DIR/roles.jsonl model.source=DIR/model --out DIR/runs
    python benchmarks/roles.py table DIR/model DIR/runs

Every third play is kept out of the pre-training, and its longer roles are the clients. The model has GPT-2's
architecture and is saved as a Hugging Face folder, with a byte-level BPE tokenizer of the same plays.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import personafl

END = "<|endoftext|>"
LEAST = 8000  # characters of a role that is a client


def roles_of(path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the texts of the roles to pre-train on, and by name those of the roles that are clients."""
    file = np.load(path)
    flat, offset = file["text"].tobytes(), file["offset"]
    texts = [flat[offset[i] : offset[i + 1]].decode() for i in range(len(offset) - 1)]
    apart = file["play"] % 3 == 2
    known = [text for text, kept in zip(texts, apart, strict=True) if not kept]
    named = zip(file["user_name"], texts, apart, strict=True)
    return known, {str(name): text for name, text, kept in named if kept and len(text) >= LEAST}


def pretrain(args: argparse.Namespace) -> None:
    """Train tokenizer and model on the plays that are known, and write them with the clients' texts."""
    known, clients = roles_of(args.data)
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"role": name, "text": text}) for name, text in clients.items()]
    (args.out / "roles.jsonl").write_text("\n".join(lines) + "\n")
    train_decoder(known, list(clients.values()), args)


def train_decoder(known: list[str], clients: list[str], args: argparse.Namespace) -> None:
    """Train tokenizer and model on known texts, and write them; print the perplexity of those of clients."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(known, trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    whole.save_pretrained(args.out / "model")

    def packed(texts: list[str]) -> torch.Tensor:
        rows = tokenizer.encode_batch(texts)
        return torch.tensor([token for row in rows for token in [*row.ids, tokenizer.token_to_id(END)]])

    train, test = packed(known), packed(clients)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=args.vocabulary, n_positions=args.length, n_embd=args.width, n_layer=args.layers, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} and {len(test):,} tokens")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, betas=(0.9, 0.95))
    begun = time.process_time()
    for step in range(args.steps):
        warm, left = min(1.0, (step + 1) / 100), 0.5 * (1 + math.cos(math.pi * step / args.steps))
        optimizer.param_groups[0]["lr"] = args.lr * warm * max(left, 0.05)
        at = torch.randint(len(train) - args.length, (args.batch,))
        x = train[at[:, None] + torch.arange(args.length)]
        loss = model(input_ids=x, attention_mask=torch.ones_like(x), labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step + 1 == args.steps:
            print(f"step {step}: loss {loss.item():.3f}, {time.process_time() - begun:.0f} s of processor", flush=True)
    model.eval()
    blocks = test[: len(test) // args.length * args.length].reshape(-1, args.length)
    with torch.no_grad():
        own = torch.stack([model(input_ids=part, labels=part).loss for part in blocks.split(64)]).mean()
    print(f"perplexity per token of the clients' texts: {own.exp():.2f}")
    model.save_pretrained(args.out / "model")


def untouched(model: Path, recipe: personafl.Recipe) -> dict[str, tuple[float, float]]:
    """Return each role's perplexity and accuracy by the model as it is, computed by transformers and torch alone."""
    from transformers import AutoModelForCausalLM

    data = personafl.describe_data(recipe).data
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    found = {}
    for client, name in enumerate(data.client_names):
        x, y = data.samples(data.test[client])
        with torch.no_grad():
            scores = network(input_ids=x, attention_mask=torch.ones_like(x)).logits.double()
        loss = functional.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-1)
        found[name] = float(loss.exp()), float((scores.argmax(-1) == y)[y >= 0].double().mean())
    return found


def table(args: argparse.Namespace) -> None:
    """Print what each variant gives the roles: perplexity, who is hurt, and bytes; mean ± std over seeds."""
    runs = runs_of(args.runs)
    recipes = {run.rows[0]["seed"]: personafl.Recipe.read(run.path / "recipe.toml") for run in runs}
    base = {seed: untouched(args.model, recipe) for seed, recipe in recipes.items()}
    print("| variant | perplexity | worst 10% | % hurt | accuracy % | kB up, a client and round |")
    print("|---|---|---|---|---|---|")
    start = [np.array([*values.values()]).T for values in base.values()]
    print(line("none", [(own.mean(), worst(own), 0.0, 100 * right.mean(), 0.0) for own, right in start]))
    for label in dict.fromkeys(run.rows[0]["method"] for run in runs):
        found = []
        for run in runs:
            if (row := run.rows[0])["method"] != label:
                continue
            clients = run.to_pandas()
            which = "personal" if "personal_test_perplexity" in clients else "global"
            mine = clients.set_index("name")[f"{which}_test_perplexity"]
            hurt = np.mean([value > base[row["seed"]][name][0] for name, value in mine.items()])
            turns = sum(entry["clients"] for _, entry in run.history().iterrows())
            sent = run.history()["bytes_up"].sum() / turns / 1000
            right = 100 * clients[f"{which}_test_accuracy"].mean()
            found.append((mine.mean(), worst(mine.to_numpy()), 100 * hurt, right, sent))
        print(line(label, found))


def runs_of(paths: list[Path]) -> list[personafl.Result]:
    """Return the runs in directories of runs and of comparisons, which may have more of them to come."""
    found = [each for path in paths for each in ([path] if (path / "recipe.toml").exists() else path.iterdir())]
    return [personafl.Result.load(each) for each in sorted(found) if (each / "result.json").exists()]


def line(label: str, found: list[tuple[float, ...]]) -> str:
    """Return a line of the table."""
    means, spread = np.mean(found, axis=0), np.std(found, axis=0)
    cells = [f"{mean:.2f} ± {std:.2f}" for mean, std in zip(means, spread, strict=True)]
    return f"| {label} | {' | '.join(cells)} |"


def worst(values: np.ndarray) -> float:
    """Return the mean of the worst tenth, the largest."""
    return float(np.sort(values)[-math.ceil(len(values) / 10) :].mean())


def add_pretrain(commands: Any, vocabulary: int) -> argparse.ArgumentParser:
    """Add the command that trains a decoder, with the sizes it has."""
    parser: argparse.ArgumentParser = commands.add_parser("pretrain")
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    sizes = {"vocabulary": vocabulary, "width": 96, "layers": 3, "length": 64, "batch": 32, "steps": 1000}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser


def main() -> None:
    """Read the arguments and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    add_pretrain(commands, 512).set_defaults(call=pretrain)
    second = commands.add_parser("table")
    second.add_argument("model", type=Path)
    second.add_argument("runs", type=Path, nargs="+")
    second.set_defaults(call=table)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
