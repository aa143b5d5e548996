"""The `[data]` part of a recipe, and the short form of a partition on the command line."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from personafl.core.reading import Reading
from personafl.options import Positive, Strict, short_form

Fraction = Annotated[float, Field(gt=0, lt=1)]
Alpha = Annotated[float, Field(gt=0, le=1e9)]  # beyond, shares cannot be told from equal ones


class Users(Strict):
    """Natural users: each user, or each random group of `merge` users, is a client."""

    kind: Literal["users"] = "users"
    merge: Positive = 1
    clients: Positive | None = None  # take this many at random; None takes all


class Classes(Strict):
    """QuPeD: `per_client` random classes per client, equally many samples of each."""

    kind: Literal["classes"] = "classes"
    clients: Positive = 50
    per_client: Positive = 4
    samples: Positive | None = None  # per client; None: as many as all can have


class Diversity(Strict):
    """FedBCD: exactly `labels` labels and `samples` samples per client."""

    kind: Literal["diversity"] = "diversity"
    clients: Positive = 50
    labels: Positive = 3
    samples: Positive | None = None  # per client; None: all samples / clients


class Dirichlet(Strict):
    """FedSLR: label mixes drawn from Dirichlet(alpha); the smaller alpha, the more the clients differ."""

    kind: Literal["dirichlet"] = "dirichlet"
    clients: Positive = 50
    alpha: Alpha = 0.3
    sizes: Literal["equal", "natural"] = "equal"


class Iid(Strict):
    """Every client draws from the same distribution."""

    kind: Literal["iid"] = "iid"
    clients: Positive = 50


class Quantity(Strict):
    """Same distribution, very different sizes: drawn from Dirichlet(alpha)."""

    kind: Literal["quantity"] = "quantity"
    clients: Positive = 50
    alpha: Alpha = 0.5


Partition = Annotated[Users | Classes | Diversity | Dirichlet | Iid | Quantity, Field(discriminator="kind")]

PARTITIONS: dict[str, type[Strict]] = {
    kind.model_fields["kind"].default: kind for kind in (Users, Classes, Diversity, Dirichlet, Iid, Quantity)
}


class Moments(Strict):
    """Mean and standard deviation of each channel, or feature of a table, to standardise inputs with."""

    mean: tuple[float, ...]
    std: tuple[Annotated[float, Field(gt=0)], ...]
    clip: Annotated[float, Field(gt=0)] | None = None  # standardised inputs are brought to within ±clip; None: are not

    @model_validator(mode="after")
    def _one_of_each(self) -> Moments:
        if len(self.mean) != len(self.std):
            raise ValueError(
                f"mean has {len(self.mean)} numbers and std {len(self.std)}; give one of each per channel or feature"
            )
        return self


class Augmentation(Strict):
    """What training does to images, at random, each time it sees them."""

    flip: bool = False  # mirrored left to right, half of the time
    crop: Annotated[int, Field(ge=0)] = 0  # framed by so many black pixels, and a window of the old size cut out


class DataConfig(Strict):
    """Which data, and how clients share them."""

    source: str = "digits"  # a name (see `personafl datasets`), a path, or hf:NAME
    # What is predicted: classes, real numbers, or sets of labels; auto: numbers where labels have fractions, sets where
    # there are several columns of true and false, else classes.
    task: Literal["auto", "classification", "regression", "multilabel"] = "auto"
    label: str | tuple[str, ...] | None = None  # column that is predicted, or several; None: one called label, y, …
    user: str | None = None  # column that says whose a row is; None: one called user, user_id, client_id, …
    split: str | None = None  # column that marks test rows: train/test or 0/1; None: one called split
    text: str | None = None  # column of text: to classify by data.label; without that its next tokens are predicted
    prompt: str | None = None  # column of what a text answers: stands before it, and is not predicted
    features: tuple[str, ...] | None = None  # columns of a table that are inputs, in this order; None: all others
    drop: tuple[str, ...] = ()  # columns that are not
    categories: dict[str, tuple[str, ...]] | None = None  # values of text columns; None: those that the file has
    missing: Literal["error", "mean"] | dict[str, float] = "error"  # or fill gaps with these numbers
    classes: Annotated[tuple[str, ...], Field(min_length=2)] | None = None  # names in order; None: those in the data
    size: Positive | None = None  # resize images to so many pixels square
    target: Literal["label", "spelling"] = "label"  # spelling: the letters of the label's name, for CTC
    partition: Partition | None = None  # None: users where the data name them, else dirichlet
    test: Literal["auto", "official"] | Fraction = "auto"
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of each client's training samples
    unseen: Annotated[int, Field(ge=0)] | Fraction = 0  # clients that never train: a count or a share
    length: Positive = 80  # tokens per text
    vocabulary: Annotated[int, Field(ge=2)] = 10_000  # word numbers; 0 is padding or a rare word
    unit: Literal["character", "word"] = "character"  # what a next-token task predicts
    tokenizer: str | None = None  # folder of one: text in its tokens; None: that of the model's folder, if it has one
    min_samples: Positive = 2  # per client; smaller users are left out
    normalize: Literal["auto", "none", "channel"] | Moments = "auto"  # see `inputs`; or by these numbers
    scale: Literal["auto"] | Moments = "auto"  # regression: targets are standardised by these; auto: by training data's
    augment: Augmentation | None = None  # of training images; None: they are seen as they are

    @model_validator(mode="after")
    def _each_once(self) -> DataConfig:
        for key in ("classes", "features"):
            names = getattr(self, key) or ()
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{key} has {twice[0]!r} twice; give each once")
        return self

    def reading(self) -> Reading:
        """Return how the source is read."""
        return Reading(**self.model_dump(include=set(Reading.model_fields)))


def parse_partition(text: str) -> dict[str, Any]:
    """Read `kind:key=value,key=value`, for example `dirichlet:alpha=0.1,clients=100`; return the keys given."""
    return short_form(text, "partition", PARTITIONS).model_dump(exclude_unset=True)
