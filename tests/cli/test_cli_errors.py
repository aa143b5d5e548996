"""Bad input through the real entry: one line that names the place and the remedy, an exit code, nothing written."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tiers import tiered

MODELS = """
import torch
from torch import nn

class Good(nn.Module):
    def __init__(self, input_shape, classes, width=5):
        super().__init__()
        self.inner, self.outer = nn.Linear(input_shape[0], width), nn.Linear(width, classes)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))

def many(classes): return nn.Linear(4, classes + 1)
def normed(classes): return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))
def other_input(classes): return nn.Linear(5, classes)
def number(): return 3
def broken(): raise KeyError("width")
def leaves(): raise SystemExit(0)
def cancelled(): raise BaseException("cancelled")
def lazy(classes): return nn.LazyLinear(classes)
def frozen(classes): return nn.Linear(4, classes).requires_grad_(False)
def none(*arguments): return None
def branching(classes): return Branching(classes)

class Detached(nn.Linear):
    def __init__(self, classes):
        super().__init__(4, classes)

    def forward(self, x):
        return super().forward(x).detach()

class Leaves(Detached):
    def forward(self, x):
        raise SystemExit

class Branching(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(4, classes)

    def forward(self, x):
        return self.layer(x) if x.sum().item() > 0 else self.layer(-x)

made = nn.Linear(4, 4)
constant = 3
"""

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good and bad files."""
    folder = tmp_path_factory.mktemp("inputs")
    x, y = np.random.default_rng(0).random((200, 4), dtype=np.float32), np.arange(200) % 4
    holed = x.copy()
    holed[3, 1] = np.nan
    files = {
        "good": {"x": x, "y": y},
        "holed": {"x": holed, "y": y},
        "words": {"x": x, "y": np.array(["a"] * 200)},
        "negative": {"x": x, "y": y - 1},
        "halves": {"x": x, "y": y + 0.5},
        "short": {"x": x, "y": y[:100]},
        "flat": {"x": x[:, 0], "y": y},
        "empty": {"x": x[:0], "y": y[:0]},
        "narrow": {"x": x[:, :0], "y": y},
        "single": {"x": x[0, 0], "y": y},
        "endless": {"x": np.where(x > x[7, 0], np.inf, x), "y": y},
        "objects": {"x": x.astype(object), "y": y},
        "numbered": {"x": x, "y": np.arange(200)},
        "below": {"x": x, "y": y, "user": y - 2},
        "unlabelled": {"x": x},
        "lonely": {"x": x, "y": y, "user": np.r_[np.zeros(199, int), 1]},
        "untested": {
            "x": x,
            "y": y,
            "user": np.arange(200) // 50,
            "split": np.r_[np.zeros(150, int), np.ones(50, int)],
        },
    }
    for name, arrays in files.items():
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    (folder / "truncated.npz").write_bytes((folder / "good.npz").read_bytes()[:800])
    (folder / "nothing.npz").touch()
    rows = "".join(f"{a},{b},{n % 4}\n" for n, (a, b) in enumerate(x[:, :2].tolist()))
    tables = {"table": f"a,b,y\n{rows}", "twice": f"a,a,y\n{rows}", "blank": "\n\n\n", "lines": "y\n0\n1\n"}
    for name, text in tables.items():
        (folder / f"{name}.csv").write_text(text)
    (folder / "latin.csv").write_bytes(f"größe,b,y\n{rows}".encode("latin-1"))
    (folder / "table.parquet").write_bytes(b"PAR1" + bytes(100))
    (folder / "file.txt").write_text("x")
    (folder / "directory").mkdir()
    (folder / "broken.toml").write_text("rounds = = 3")
    (folder / "misspelt.toml").write_text("[training]\nlrr = 3")
    (folder / "unknown.toml").write_text('[compare]\nmethods = ["fedavg", "dito"]')
    (folder / "my_models.py").write_text(MODELS)
    (folder / "my_syntax.py").write_text("def (")
    (folder / "my_exit.py").write_text("raise SystemExit('not here')")
    return folder


@pytest.fixture
def main(inputs: Path, monkeypatch: pytest.MonkeyPatch, called: Main) -> Main:
    """Call the command line in this process: (exit code, standard output, standard error)."""
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return called


def fails(main: Main, folder: Path, line: str, code: int, *texts: str) -> str:
    before = sorted(folder.rglob("*"))
    got, out, err = main(*line.split())
    assert (got, out) == (code, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for text in texts:
        assert text in err
    assert sorted(folder.rglob("*")) == before
    return err


FILES = [
    ("missing.npz", "missing.npz", "check the path"),
    ("truncated.npz", "truncated.npz", "truncated", "np.savez"),
    ("nothing.npz", "nothing.npz", "truncated"),
    ("holed.npz", "holed.npz", "sample 3", "NaN", "remove or fill"),
    ("words.npz", "words.npz", "every label is 'a'", "check"),
    ("halves.npz data.task=classification", "halves.npz", "measurements such as 0.5", "make few classes"),
    ("negative.npz", "negative.npz", "label -1", 'data.classes = ["-1", "0"'),
    ("short.npz", "short.npz", "200 samples but 100 labels"),
    ("flat.npz", "flat.npz", "shape [200]"),
    ("empty.npz", "empty.npz", "no samples"),
    ("narrow.npz", "narrow.npz", "samples without numbers"),
    ("single.npz", "single.npz", "x has shape []"),
    ("endless.npz", "endless.npz", "NaN or infinity", "remove or fill"),
    ("objects.npz", "objects.npz", "pickled objects are refused"),
    ("numbered.npz", "200 different labels in 200 samples", "data.task=regression"),
    ("below.npz", "user -2 is negative", "number users from 0"),
    ("unlabelled.npz", "unlabelled.npz", "y, labels or targets"),
    ("file.txt", "file.txt", "not recognised", "FILE.npz"),
    ("directory", "directory", "no data recognised"),
    ("mnist", "mnist", "files you have"),
    ("digts", "digts", "did you mean 'digits'"),
    ("twice.csv", "twice.csv: two columns are called 'a'", "a name of its own"),
    ("blank.csv", "blank.csv: is empty"),
    ("lines.csv", "lines.csv: has no column besides label"),
    ("latin.csv", "latin.csv: is not UTF-8", "save it as UTF-8"),
    ("table.parquet", "table.parquet: cannot be read as Parquet"),
    ("table.csv data.features=[]", "nothing to learn from"),
    ("table.csv data.drop=['y']", "data.drop has 'y', which is the label"),
    ("table.csv data.missing={c=1}", "data.missing has 'c', which is no column"),
    ("table.csv --user y", "column 'y' cannot be two of data.label, data.user, data.split, data.text and data.prompt"),
    ("table.csv --user a", "no client of table has min_samples = 2 samples, but at most 1", "data.user"),
    ("lonely.npz data.min_samples=1", "client '1'", "too few samples", "min_samples = 2"),
    ("untested.npz data.test=official", "client '3'", "training data", "data.test = 'auto'"),
]


@pytest.mark.parametrize("command", ["run", "compare", "data describe"])
@pytest.mark.parametrize("case", FILES, ids=lambda case: case[0])
def test_data_that_cannot_be_used(main: Main, inputs: Path, command: str, case: tuple[str, ...]) -> None:
    fails(main, inputs, f"{command} --dataset {case[0]}", 2, *case[1:])


KEYS = [
    # the population
    ("--partition classes:per_client=5", "per_client = 5", "only 4 classes", "at most 4"),
    ("--partition diversity:labels=5", "labels = 5", "only 4 classes"),
    ("--partition iid:clients=150", "clients = 150", "at most 100"),
    ("--partition users", "'users'", "does not name its users", "use dirichlet"),
    ("--partition dirichle", "'dirichle'", "did you mean 'dirichlet'"),
    ("--partition dirichlet:alph=1", "'alph'", "did you mean 'alpha'"),
    ("--partition dirichlet:alpha=0", "alpha", "greater than 0"),
    ("federation.cohort=5", "federation.cohort", "only 4 take part", "lower it"),
    ("federation.cohort=0", "federation.cohort", "at least 1", "given: 0"),
    ("federation.cohort=1.5", "federation.cohort", "a share", "given: 1.5"),
    ("devices=[{share=0.5}]", "devices[0].share: the shares add up to 0.5, not 1"),
    ("devices=[{share=1,bits=9}]", "devices[0].bits", "less than or equal to 8"),
    ("devices=[{clients=['9']}]", "devices[0].clients: there is no client '9'", "valid: 0, 1, 2, 3"),
    ("devices=[{share=1,model.name='linear'}] method.name=fedavg", "devices: fedavg", "use a method that can (local"),
    ("devices.bits=2", "devices: is a list of sections"),
    ("data.unseen=4", "data.unseen = 4", "at least one must train"),
    ("data.test=official", "data.test", "no test half"),
    # values
    ("rounds=0", "rounds", "greater than or equal to 1"),
    ("--rounds 0", "rounds", "greater than or equal to 1"),
    ("--rounds many", "--rounds", "integer"),
    ("rounds=1.5", "rounds: input should be a valid integer (given: 1.5)"),
    ("seed=-1", "seed"),
    ("rounds=99999999999999999999", "rounds: input should be less than or equal to 1000000000"),
    ("rounds=nan", "rounds"),
    ("compare.variants={'a/b'={rounds=1}}", "compare.variants: 'a/b' would name no directory"),
    ("engine.workers=100000", "engine.workers: input should be less than or equal to 1024"),
    ("engine.threads=1000000000000", "engine.threads: input should be less than or equal to 1024"),
    ("training.lr=nan", "training.lr"),
    ("training.lr=inf", "training.lr: input should be a finite number"),
    ("training.lr=Infinity", "training.lr: input should be a finite number"),
    ("training.weight_decay=1e300", "training.weight_decay", "at most 3.4e+38"),
    ("training.schedule={kind='step',factor=inf}", "training.schedule.factor: input should be a finite number"),
    ("training.schedule={kind='step',every=0}", "training.schedule.every: input should be greater than or equal to 1"),
    ("data.normalize={mean=[inf],std=[1]}", "data.normalize.mean: input should be a finite number"),
    ("--partition dirichlet:alpha=inf", "alpha", "less than or equal to 1000000000"),
    ("compare.options.ditto.pull=inf", "compare.options.ditto.pull: input should be a finite number"),
    ("compare.variants={a={training={lr=inf}}}", "compare.variants.a.training.lr: input should be a finite number"),
    ("compare.variants={a={method=3}}", "compare.variants.a.method: is a section"),
    ("rounds=true", "rounds: input should be a number, not true or false (given: true)"),
    ("training.batch=true", "training.batch: input should be a number"),
    ("compare.seeds=[true]", "compare.seeds: input should be a number"),
    ("devices=[{share=1,bits=true}]", "devices[0].bits: input should be a number"),
    ("model.name=mlp model.hidden=[true]", "model.hidden: input should be a number"),
    ("training.steps=1000000000000", "training.steps: input should be less than or equal to 1000000000"),
    ("training.epochs=1000000000", "training: a client goes through 40,000,000,000 samples", "lower its epochs"),
    ("engine.device=mps", "engine.device: 'mps' is not available here", "use cpu"),
    ("training.momentum=nan", "training.momentum"),
    ("training.clip=0", "training.clip"),
    ("training.batch=0", "training.batch"),
    ("training.epochs=0", "training.epochs"),
    ("data.unseen=nan", "data.unseen"),
    ("data.validation=1", "data.validation"),
    ("data.test=nan", "data.test"),
    ("federation.cohort=nan", "federation.cohort"),
    ("federation.cohort=inf", "federation.cohort"),
    ("engine.memory_mb=-1", "engine.memory_mb"),
    ("name=a/b", "name", "letters, digits"),
    ("training.lr=-1", "training.lr", "greater than 0"),
    ("training.batch=al", "training.batch: input should be a valid integer, or 'all' (given: 'al')"),
    ("training.epochs=1 training.steps=1", "training: give either epochs or steps"),
    ("training.optimizer=adm", "training.optimizer", "'sgd', 'adam', 'adamw' or 'accelerated'"),
    ("training.optimizer=adam training.momentum=0.9", "momentum and nesterov are for sgd"),
    ("evaluation.every=-1", "evaluation.every", "'auto'"),
    ("data.test=offical", "data.test: input should be 'auto' or 'official', or a valid number"),
    ("engine.strategy=fast", "engine.strategy", "'stacked'"),
    ("engine.device=gpu", "engine.device", "cuda"),
    # misspelt keys, at every level
    ("round=3", "round: unknown key; did you mean 'rounds'"),
    ("trainin.lr=1", "trainin: unknown key; did you mean 'training'"),
    ("training.lrr=1", "training.lrr: unknown key; did you mean 'lr'"),
    ("federation.cohrt=1", "federation.cohrt: unknown key; did you mean 'cohort'"),
    ("data.sourc=x", "data.sourc: unknown key; did you mean 'source'"),
    ("data.partition.kind=dirchlet", "data.partition.kind: no 'dirchlet'; did you mean 'dirichlet'"),
    ("data.partition.client=3", "data.partition.client: unknown key; did you mean 'clients'"),
    ("training.schedule.kind=lin", "training.schedule.kind: no 'lin'; did you mean 'linear'"),
    ("training.schedule.every=3", "training.schedule: 'kind' is missing; valid: constant, exponential"),
    ("training.schedule.kind=step training.schedule.evry=3", "training.schedule.evry", "did you mean 'every'"),
    ("engine.stratgy=auto", "engine.stratgy", "'strategy'"),
    ("evaluation.evry=1", "evaluation.evry", "'every'"),
    ("compare.method=3", "compare.method", "'methods'"),
    ("compare.options.dito.pull=3", "compare.options", "no method 'dito'", "did you mean 'ditto'"),
    ("compare.options.ditto.pul=3", "compare.options.ditto.pul: unknown key; did you mean 'pull'"),
    ("compare.options.ditto.pull=x", "compare.options.ditto.pull: input should be a valid number (given: 'x')"),
    ("compare.options.fedavg.server.lrr=1", "compare.options.fedavg.server.lrr: unknown key; did you mean 'lr'"),
    ('compare.methods=["fedavg","dito"]', "compare.methods", "no method 'dito'", "did you mean 'ditto'"),
    ("unknown.toml", "unknown.toml: compare.methods: no method 'dito'"),
    ("compare.methods=[]", "compare.methods", "at least one"),
    ("compare.seeds=[0,0]", "compare.seeds", "0 is there twice"),
    ("compare.seeds=[-1]", "compare.seeds", "greater than or equal to 0"),
    # a section is no value, and the other way round
    ("training=5", "training: is a section", "write training.optimizer=…"),
    ("model=5", "model: is a section", "given: 5", "write model.name=…"),
    ("model=mpl", "no model 'mpl'", "did you mean 'mlp'"),
    ("training=5 training.lr=1", "training.lr: 'training' is a value here"),
    ("training.schedule=linear", "training.schedule: is a section", "write training.schedule.kind=…"),
    ("rounds.number=3", "rounds.number: 'rounds' is a value here"),
    ("a..b=3", "a..b=3", "write key.sub=value"),
    # models
    ("model.name=mpl", "model.name: no model 'mpl'; did you mean 'mlp'", "package.module:Name"),
    ("model.nam=mlp", "model.nam: unknown key; did you mean 'name'"),
    ("model.name=mlp model.hiden=[3]", "model.hiden: unknown key; did you mean 'hidden'"),
    ("model.name=mlp model.hidden=[0]", "model.hidden: input should be greater than or equal to 1"),
    (
        "model.name=linear model.hidden=[3]",
        "model.hidden: unknown key; valid: adapter, adapter_from, ",
        "buffers, frozen, name, personal",
    ),
    ("model.buffers=keep", "model.buffers", "'dropped'"),
    ("model.name=cnn", "'cnn'", "for images", "use mlp"),
    ("model.name=bag", "'bag' is for text", "use mlp"),
    ("model.name=my_models.Good", "no model 'my_models.Good'", "package.module:Name"),
    ("model.name=nowhere:Net", "model.name", "No module named 'nowhere'", "PYTHONPATH"),
    ("model.name=my_models:Nothing", "model.name", "no attribute 'Nothing'"),
    ("model.name=my_syntax:Net", "model.name", "my_syntax.py, line 1"),
    ("model.name=:Net", "model.name", "cannot import"),
    ("model.name=my_models:constant", "model.name", "is a int"),
    ("model.name=my_models:number", "made int, not an nn.Module"),
    ("model.name=my_models:broken", "my_models:broken", "KeyError: 'width'"),
    ("model.name=sys:exit", "model: 'sys:exit' cannot be built", "SystemExit"),
    ("model.name=my_models:leaves", "my_models:leaves", "SystemExit: 0"),
    ("model.name=my_models:Leaves", "model: it does not accept", "SystemExit"),
    ("model.name=my_models:cancelled", "my_models:cancelled", "BaseException: cancelled"),
    ("model.name=my_models:lazy", "my_models:lazy", "uninitialized parameter"),
    ("model.name=my_models:frozen", "model: no parameter of it has a gradient"),
    ("model.name=my_models:Detached", "model: no parameter of it has a gradient"),
    ("model.name=my_exit:Net", "model.name: cannot import 'my_exit:Net': SystemExit: not here"),
    ("model.name=builtins:dict", "model.name: 'builtins:dict' does not say which options it takes"),
    ("model.name=my_models:Good model.widht=3", "my_models:Good", "unexpected keyword argument 'widht'"),
    ("model.name=my_models:many", "model: its output for 2 samples has shape [2, 5]", "needs [2, 4]"),
    ("model.name=my_models:other_input", "model: it does not accept", "shape [4]"),
    ("model.name=my_models:normed", "layers 1 keep running statistics", "use GroupNorm", "model.buffers"),
    ("model.name=my_models:branching engine.strategy=stacked", "engine.strategy", "cannot batch line", "auto"),
    ("model.name=my_models:made model.width=3", "model.width", "takes no options"),
]
DATA = "--dataset good.npz --partition iid:clients=4 --rounds 2 --quiet"


@pytest.mark.parametrize("command", tiered(["run", "compare"], ["run"]))
@pytest.mark.parametrize("case", KEYS, ids=lambda case: case[0])
def test_recipes_that_cannot_be_run(main: Main, inputs: Path, command: str, case: tuple[str, ...]) -> None:
    fails(main, inputs, f"{command} {DATA} {case[0]}", 2, *case[1:])


@pytest.mark.parametrize(
    "case",
    [
        ("method.name=dito", "method.name: no method 'dito'; did you mean 'ditto'"),
        ("--method dito", "method.name: no method 'dito'"),
        ("method.nam=ditto", "method.nam: unknown key; did you mean 'name'"),
        ("method.name=ditto method.pul=3", "method.pul: unknown key; did you mean 'pull'"),
        ("method.name=ditto method.pull=x", "method.pull: input should be a valid number (given: 'x')"),
        ("method.server.lrr=3", "method.server.lrr: unknown key; did you mean 'lr'"),
        ("method.server=3", "method.server: is a section", "write method.server.optimizer=…"),
        ("method.server.optimizer=admm", "method.server.optimizer", "'sgd'", "'yogi'"),
        ("method.server.optimizer=adam method.server.momentum=3", "method.server.momentum: unknown key"),
        ("method.server.schedule.kind=x", "method.server.schedule.kind"),
        ("method.name=ditto method.pull=inf", "method.pull: input should be a finite number"),
        ("method.name=ditto method.tune_epochs=true", "method.tune_epochs: input should be a number"),
        ("method.name=finetune method.tune_epochs=999999999", "(phase 'tune')", "lower its epochs or steps"),
        ("method.server.lr=inf", "method.server.lr: input should be a finite number"),
        ("method.server.lr=-1", "method.server.lr: input should be greater than 0"),
        ("method.name=sys:exit", "method: 'sys:exit' cannot be made: SystemExit"),
        ("method.name=my_models:none", "method.name: 'my_models:none' made a NoneType, not an Algorithm"),
    ],
    ids=lambda case: case[0],
)
def test_methods_that_do_not_exist(main: Main, inputs: Path, case: tuple[str, ...]) -> None:
    fails(main, inputs, f"run {DATA} {case[0]}", 2, *case[1:])


@pytest.mark.parametrize(
    "case",
    [
        ("--tune 0", "compare.tune: input should be greater than or equal to 1 (given: 0)"),
        ("--methods fedavg,dito", "compare.methods: no method 'dito'; did you mean 'ditto'"),
        ("--methods ,", "compare.methods: give at least one"),
        ("--methods ditto,ditto", "compare.methods: 'ditto' is there twice"),
        ("--seeds 0,one", "compare.seeds: input should be a valid integer (given: 'one')"),
        ("--methods fedavg compare.options.dito.pull=3", "compare.options: no method 'dito'"),
    ],
    ids=lambda case: case[0],
)
def test_comparisons_that_cannot_be_made(main: Main, inputs: Path, case: tuple[str, ...]) -> None:
    fails(main, inputs, f"compare {DATA} {case[0]}", 2, *case[1:])


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_device_that_is_not_there(main: Main, inputs: Path, command: str) -> None:
    fails(main, inputs, f"{command} {DATA} engine.device=cuda:99", 2, "engine.device: 'cuda:99'", "use cpu")


@pytest.mark.parametrize("command", ["run", "compare"])
def test_where_a_run_cannot_go(main: Main, inputs: Path, command: str) -> None:
    fails(main, inputs, f"{command} {DATA} --out directory", 2, "directory: exists already", "personafl resume")
    fails(main, inputs, f"{command} {DATA} --out file.txt", 2, "file.txt: exists already")
    fails(
        main,
        inputs,
        f"{command} {DATA} --out file.txt/run",
        2,
        "file.txt/run: cannot be written",
        "choose another --out",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(main: Main, inputs: Path) -> None:
    (inputs / "directory").chmod(0o555)
    fails(main, inputs, f"run {DATA} --out directory/run", 2, "no permission", "choose another --out")


@pytest.mark.parametrize("command", ["data describe --dataset good.npz", "run --from directory"])
def test_what_may_not_be_read(main: Main, inputs: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "exists", refuse)
    fails(main, inputs, command, 2, ": no permission to read or write it", "use a copy")


@pytest.mark.parametrize(
    "case",
    [
        ("run nothing.toml", "nothing.toml: no such recipe file"),
        ("run ditto", "ditto: no such recipe file", "key.sub=value"),
        ("run broken.toml", "broken.toml: not valid TOML", "line 1"),
        ("run misspelt.toml", "misspelt.toml: training.lrr: unknown key; did you mean 'lr'"),
        ("run directory", "directory: cannot be read"),
        ("run broken.toml misspelt.toml", "misspelt.toml", "only one recipe"),
        ("show directory", "directory: not a run directory"),
        ("show nowhere", "nowhere: not a run directory"),
        ("resume directory", "directory: not a run directory"),
        ("resume file.txt", "file.txt: not a run directory"),
        ("compar", "Did you mean 'compare'"),
        ("run --roundz 3", "--roundz", "--rounds"),
        ("show", "RUN"),
    ],
    ids=lambda case: case[0],
)
def test_commands_that_make_no_sense(main: Main, inputs: Path, case: tuple[str, ...]) -> None:
    fails(main, inputs, case[0], 2, *case[1:])


def test_divergence_names_round_and_clients_and_keeps_the_run(main: Main, tmp_path: Path) -> None:
    code, out, err = main("run", *DATA.split(), "training.lr=1e30", "--out", str(tmp_path / "run"))
    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    assert "round 1" in err
    assert "clients 0, 1, 2, 3" in err
    assert "lower training.lr" in err
    assert (tmp_path / "run" / "recipe.toml").exists()


def test_a_user_model_by_dotted_path_or_made_already(main: Main, tmp_path: Path) -> None:
    for name in ("Good model.width=3", "made"):
        code, out, err = main("run", *f"{DATA} --json --model my_models:{name} --out".split(), str(tmp_path / name))
        assert (code, err) == (0, "")
        assert '"method": "fedavg"' in out


@pytest.mark.system
def test_exit_codes_of_a_real_process(inputs: Path, tmp_path: Path) -> None:
    """Also: a model in the current folder is found although only the script's own folder is on the path."""
    command = Path(sys.executable).with_name("personafl")

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run([command, *words], cwd=inputs, env=environment, capture_output=True, text=True)

    bad = run("compare", "--dataset", "holed.npz", "--json")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    good = run("run", *DATA.split(), "--model", "my_models:Good", "--json", "--out", str(tmp_path / "b"))
    assert (good.returncode, good.stderr) == (0, "")
    assert not (inputs / "runs").exists()
