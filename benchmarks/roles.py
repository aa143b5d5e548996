"""Which part should be personal? A small decoder, trained on some of Shakespeare's plays, for the roles of others.

    python benchmarks/roles.py pretrain PATH/shakespeare_roles.npz --out DIR   # DIR/model and DIR/roles.jsonl
    python benchmarks/roles.py compare DIR --seeds 0,1,2                       # DIR/runs and a table

Every third play is kept out of the pre-training, and its longer roles are the clients. The model has GPT-2's
architecture and is saved as a Hugging Face folder, with a byte-level BPE tokenizer of the same plays.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

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
    """Train tokenizer and model, and write them with the clients' texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    known, clients = roles_of(args.data)
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"role": name, "text": text}) for name, text in clients.items()]
    (args.out / "roles.jsonl").write_text("\n".join(lines) + "\n")
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

    train, test = packed(known), packed(list(clients.values()))
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
        loss = model(input_ids=x, labels=x).loss
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


def main() -> None:
    """Read the arguments and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("pretrain")
    first.add_argument("data", type=Path)
    first.add_argument("--out", type=Path, required=True)
    for name, value in {
        "vocabulary": 1024,
        "width": 128,
        "layers": 4,
        "length": 64,
        "batch": 32,
        "steps": 3000,
    }.items():
        first.add_argument(f"--{name}", type=int, default=value)
    first.add_argument("--lr", type=float, default=2e-3)
    first.set_defaults(call=pretrain)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
