"""Which part should be personal? A small decoder, trained on AG News of unknown origin, for classes of agencies' news.

    python benchmarks/agencies.py pretrain PATH/agnews.npz --out DIR   # DIR/model and DIR/news.jsonl
    personafl compare recipes/agencies.toml --dataset DIR/news.jsonl model.source=DIR/model --out DIR/runs
    python benchmarks/agencies.py table DIR/runs

The clients are the news agencies that a text names (a guess of `agnews.npz`), each with at most so many texts as
`--most` says, drawn. The decoder is that of `roles.py`; it is pre-trained on texts whose agency is unknown.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import personafl
from roles import add_pretrain, line, runs_of, train_decoder

LEAST = 60  # texts of an agency that is a client
REFERENCE = "head"  # the variant that others are compared with: the model as it is, and one head for all


def pretrain(args: argparse.Namespace) -> None:
    """Train tokenizer and model on texts of no known agency, and write them with the others."""
    file = np.load(args.data)
    flat, offset, agency = file["text"].tobytes(), file["offset"], file["agency"]
    texts = [flat[offset[i] : offset[i + 1]].decode() for i in range(len(agency))]
    dice = np.random.default_rng(0)
    rows = []
    for number, name in enumerate(file["agency_name"]):
        own = np.flatnonzero(agency == number)
        if number and len(own) >= LEAST:
            rows += [(str(name), int(row)) for row in np.sort(dice.permutation(own)[: args.most])]
    args.out.mkdir(parents=True, exist_ok=True)
    classes = file["class_name"]
    with open(args.out / "news.jsonl", "w") as out:
        for name, row in rows:
            print(
                json.dumps({"agency": name, "topic": str(classes[file["labels"][row]]), "text": texts[row]}), file=out
            )
    print(f"{len({name for name, _ in rows})} agencies with {len(rows)} texts")
    train_decoder([texts[row] for row in np.flatnonzero(agency == 0)], [texts[row] for _, row in rows], args)


def table(args: argparse.Namespace) -> None:
    """Print what each variant gives the agencies: accuracy in %, who is hurt, and bytes; mean ± std over seeds."""
    runs = runs_of(args.runs)
    scores = {(run.rows[0]["method"], run.rows[0]["seed"]): own_scores(run) for run in runs}
    print("| variant | mean | worst 10% | % hurt | kB up, a client and round |")
    print("|---|---|---|---|---|")
    recipes = {run.rows[0]["seed"]: personafl.Recipe.read(run.path / "recipe.toml") for run in runs}
    guesses = [most_frequent(recipe) for recipe in recipes.values()]
    print(line("its most frequent topic", [(100 * own.mean(), 100 * worst(own), np.nan, 0.0) for own in guesses]))
    for label in dict.fromkeys(run.rows[0]["method"] for run in runs):
        found = []
        for run in runs:
            if (row := run.rows[0])["method"] != label:
                continue
            mine, start = scores[label, row["seed"]], scores[REFERENCE, row["seed"]]
            own = np.array([*mine.values()])
            hurt = np.mean([mine[name] < start[name] for name in mine])
            sent = run.history()["bytes_up"].sum() / run.history()["clients"].sum() / 1000
            found.append((100 * own.mean(), 100 * worst(own), 100 * hurt, sent))
        print(line(label, found))


def most_frequent(recipe: personafl.Recipe) -> np.ndarray:
    """Return each client's accuracy on its test texts if the topic it has most of in training is all that is said."""
    data = personafl.describe_data(recipe).data
    topics = [(data.y[data.train[client]], data.y[data.test[client]]) for client in data.seen]
    return np.array([float((test == train.mode().values).double().mean()) for train, test in topics])


def worst(scores: np.ndarray) -> float:
    """Return the mean of the worst tenth."""
    return float(np.sort(scores)[: -(-len(scores) // 10)].mean())


def own_scores(run: personafl.Result) -> dict[str, float]:
    """Return each client's accuracy on its test texts, of its own model if it has one."""
    clients = run.to_pandas()
    which = "personal" if "personal_test_accuracy" in clients else "global"
    return dict(zip(clients["name"], clients[f"{which}_test_accuracy"], strict=True))


def main() -> None:
    """Read the arguments and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    first = add_pretrain(commands, 1024)
    first.add_argument("--most", type=int, default=400)
    first.set_defaults(call=pretrain)
    second = commands.add_parser("table")
    second.add_argument("runs", type=Path, nargs="+")
    second.set_defaults(call=table)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
