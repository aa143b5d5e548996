"""A loss and metrics of the user's own, as functions: through comparisons, and in every way to get them wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.nn import functional

import personafl

DIGITS = load_digits()
DATA = {
    f"client-{place}": (DIGITS.images[rows].reshape(-1, 64) / 16, DIGITS.target[rows])
    for place, rows in enumerate(np.array_split(np.arange(600), 5))
}
SETTINGS = {"model.hidden": [16], "engine.threads": 1, "engine.workers": 1}


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    """(1 − p)² · −log p (Lin et al. 2017)."""
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return (1 - (-losses).exp()) ** 2 * losses


def macro_f1(outputs: Tensor, targets: Tensor) -> float:
    return float(f1_score(targets, outputs.argmax(-1), average="macro"))


def sure(outputs: Tensor, targets: Tensor) -> Tensor:
    """One for each sample: how probable its label was."""
    return outputs.softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> personafl.Comparison:
    return personafl.compare(
        DATA,
        ["fedavg", "ditto", "quped"],
        model="mlp",
        loss=focal,
        metrics={"macro_f1": macro_f1, "sure": sure},
        rounds=4,
        settings=SETTINGS,
        out=tmp_path_factory.mktemp("functions") / "c",
    )


def test_metrics_are_those_of_each_clients_model(found: personafl.Comparison) -> None:
    by_method = {result.rows[0]["method"]: result for result in found.results}
    for method, model in (("fedavg", "global"), ("ditto", "personal")):
        result = by_method[method]
        values, probable = [], []
        clients = result.clients.set_index("name")
        for name in DATA:
            network = result.model(name)
            data = result.given.dealt(personafl.Recipe.kept(result.path / "recipe.toml"))
            rows = data.test[data.client_number(name, "")]
            with torch.no_grad():
                scores = network(data.x[torch.from_numpy(rows)])
            values.append(macro_f1(scores, data.y[torch.from_numpy(rows)]))
            probable.append(float(sure(scores, data.y[torch.from_numpy(rows)]).mean()))
            assert clients.loc[name, f"{model}_test_macro_f1"] == pytest.approx(values[-1])
        row = next(row for row in result.rows if (row["model"], row["split"]) == (model, "test"))
        assert row["macro_f1"] == pytest.approx(np.mean(values))
        assert row["sure"] == pytest.approx(np.mean(probable), abs=1e-5)
    assert "macro_f1" in str(found)
    assert "macro_f1" in (found.path / "report.html").read_text()


def test_the_loss_is_the_one_that_is_trained(found: personafl.Comparison, tmp_path: Path) -> None:
    plain = personafl.run(DATA, "fedavg", model="mlp", rounds=4, settings=SETTINGS, out=tmp_path / "plain")
    mine = next(result for result in found.results if result.rows[0]["method"] == "fedavg")
    losses = [next(row["loss"] for row in one.rows if row["split"] == "test") for one in (mine, plain)]
    assert losses[0] < losses[1]  # a focal loss is at most the cross-entropy
    weights = [next(one.model("client-0").parameters()) for one in (mine, plain)]
    assert not torch.equal(*weights)
    same = personafl.run(
        DATA,
        "fedavg",
        model="mlp",
        loss=lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="none"),
        rounds=4,
        settings=SETTINGS | {"engine.strategy": "sequential"},
        out=tmp_path / "same",
    )
    torch.testing.assert_close(next(same.model("client-0").parameters()), weights[1], atol=1e-5, rtol=1e-4)


def test_it_goes_on_with_the_same_functions_alone(found: personafl.Comparison) -> None:
    mine = next(result for result in found.results if result.rows[0]["method"] == "fedavg")
    with pytest.raises(personafl.BadInput, match=r"was begun in Python with objects \(data=…, loss=…, metrics=…\)"):
        personafl.resume(mine.path, changes={"rounds": 5})


def scalar(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


def broken(outputs: Tensor, targets: Tensor) -> Tensor:
    raise RuntimeError("no such thing")


def unstackable(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([row.sum() * row[0].item() for row in outputs])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"loss": "mse"}, "loss = 'mse': give a function of outputs and targets"),
    ({"loss": 3}, "loss: is a int; give a function"),
    ({"loss": scalar}, r"loss: returned shape \[\] for 2 samples; return one for each"),
    ({"loss": lambda outputs, targets: 3.0}, "loss: returned float for 2 samples"),
    ({"loss": broken}, "loss: cannot be used: RuntimeError: no such thing"),
    ({"loss": unstackable}, r"loss: torch\.func\.vmap cannot batch it over clients"),
    ({"loss": lambda outputs: outputs}, "loss: cannot be used: TypeError"),
    ({"metrics": macro_f1}, "metrics: is a function; give a dict"),
    ({"metrics": {"accuracy": macro_f1}}, "metrics: 'accuracy' cannot be the name of a metric"),
    ({"metrics": {"two words": macro_f1}}, "metrics: 'two words' cannot be the name"),
    ({"metrics": {"f": "macro"}}, r"metrics\['f'\]: is a str; give a function"),
    ({"metrics": {"f": broken}}, r"metrics\['f'\]: failed on .* samples: RuntimeError: no such thing"),
    ({"metrics": {"f": lambda o, t: o}}, r"metrics\['f'\]: returned shape \[.*, 10\]"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_functions_are_said_in_one_line(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(personafl.BadInput, match=message) as caught:
        personafl.run(DATA, "fedavg", model="mlp", rounds=1, settings=SETTINGS, out=tmp_path / "r", **arguments)
    assert "\n" not in str(caught.value)


def test_a_client_without_a_metric_is_left_out_of_its_mean(tmp_path: Path) -> None:
    def picky(outputs: Tensor, targets: Tensor) -> float:
        if len(targets) == 24:
            raise ValueError("not these")
        return 0.25

    with pytest.warns(UserWarning, match=r"metrics\['picky'\]: .*not these; a client is left out of its mean"):
        result = personafl.run(
            {**DATA, "more": (DATA["client-0"][0][:60], DATA["client-0"][1][:60])},
            "fedavg", model="mlp", metrics={"picky": picky}, rounds=1, settings=SETTINGS, out=tmp_path / "r",
        )  # fmt: skip
    assert result.rows[0]["picky"] == 0.25
    assert result.clients["global_test_picky"].isna().sum() == 5


class Gru(nn.Module):
    """Eight rows of a digit, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 12, batch_first=True), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.gru(x.reshape(-1, 8, 8))[0][:, -1])
        return scores


def test_a_gru_with_an_own_loss(tmp_path: Path) -> None:
    result = personafl.run(
        DATA, "ditto", model=Gru(), loss=focal, metrics={"macro_f1": macro_f1}, rounds=2,
        settings={"engine.threads": 1, "engine.workers": 1}, out=tmp_path / "r",
    )  # fmt: skip
    assert result.predict("client-3", DATA["client-3"][0]).shape == (120,)
    assert all("macro_f1" in row for row in result.rows)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch loops over clients in one operation
def test_a_hugging_face_module(tmp_path: Path) -> None:
    """A transformer of theirs, as a network that gives scores."""
    transformers = pytest.importorskip("transformers")

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.BertConfig(
                vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                num_labels=3, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )  # fmt: skip
            self.bert = transformers.BertForSequenceClassification(config)

        def forward(self, tokens: Tensor) -> Tensor:
            scores: Tensor = self.bert(tokens).logits
            return scores

    dice = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = dice.integers(0, 13, (90, 12)) + 13 * y[:, None]
    data = {f"c{place}": (x[place::3], y[place::3]) for place in range(3)}
    settings = {"training.lr": 0.3, "model.personal": ["bert.classifier.*"], "model.buffers": "dropped"}
    methods = ["fedavg", "fedalt"]
    result = personafl.compare(
        data, methods, model=Small(), loss=focal, rounds=8, settings=settings, out=tmp_path / "r"
    )
    assert not result.failures
    assert result.best().accuracy > 0.5
