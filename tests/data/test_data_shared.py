"""Real data, where they lie beside the project: sizes, time and memory of 10,000 clients over MNIST."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from personafl.data.build import load
from personafl.data.config import DataConfig, parse_partition

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets (../shared/data) are not here")

MEASURE = """
import json, sys, time
from personafl.data.build import federate
from personafl.data.config import DataConfig, parse_partition
from personafl.data.sources import load_dataset
from personafl.system import peak_memory
dataset = load_dataset(sys.argv[1])
results = {}
for text in sys.argv[2:]:
    config = DataConfig.model_validate({"partition": parse_partition(text)})
    start = time.process_time()
    data = federate(dataset, config, 0)
    results[text] = [time.process_time() - start, data.clients, int(data.train.sizes.min()), int(data.test.sizes.min())]
print(json.dumps({"mb": peak_memory(), "results": results}))
"""

TEN_THOUSAND = (
    "iid:clients=10000",
    "quantity:clients=10000",
    "classes:clients=10000,per_client=2",
    "diversity:clients=10000,labels=3",
    "dirichlet:clients=10000,alpha=0.1",
    "dirichlet:clients=10000,alpha=0.1,sizes=natural",
)


@needs_shared
@pytest.mark.system
def test_ten_thousand_clients_are_dealt_quickly_in_little_memory() -> None:
    command = [sys.executable, "-c", MEASURE, str(SHARED / "mnist" / "mnist.npz"), *TEN_THOUSAND]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    assert measured["mb"] < 1500
    for text, (seconds, clients, least_train, least_test) in measured["results"].items():
        assert seconds < 20, text  # of the processor, and not of a busy machine
        assert (clients, min(least_train, least_test) >= 1) == (10_000, True), text


@needs_shared
@pytest.mark.parametrize(
    ("file", "shape", "classes", "clients"),
    [
        ("mnist/mnist_writers32.npz", (1, 28, 28), 10, 32),
        ("chars74k_hnd/chars74k_hnd.npz", (1, 28, 28), 62, 55),
        ("fsdd/fsdd_logmel.npz", (1, 32, 32), 10, 6),
        ("cifar100/cifar100_5k1k.npz", (3, 32, 32), 100, 50),
        ("shakespeare/shakespeare_roles.npz", (80,), 72, 1016),
    ],
)
def test_real_files_by_default(file: str, shape: tuple[int, ...], classes: int, clients: int) -> None:
    data = load(DataConfig(source=str(SHARED / file)), seed=0)
    assert tuple(data.x.shape[1:]) == shape
    assert (data.classes, data.clients) == (classes, clients)
    assert data.train.sizes.min() >= 1
    assert data.test.sizes.min() >= 1


@needs_shared
def test_mnist_by_writer_keeps_the_539_training_writers() -> None:
    data = load(DataConfig(source=str(SHARED / "mnist" / "mnist.npz"), unseen=39), seed=0)
    assert (len(data.seen), len(data.unseen)) == (500, 39)
    assert len(data.notes) == 1


@needs_shared
def test_fedbcd_diversity_uses_all_of_mnist() -> None:
    partition = parse_partition("diversity:clients=100,labels=3,samples=600")
    source = str(SHARED / "mnist" / "mnist.npz")
    data = load(DataConfig.model_validate({"source": source, "partition": partition}), seed=0)
    assert data.train.sizes.tolist() == [600] * 100
    assert ((data.counts("train") > 0).sum(axis=1) == 3).all()
    assert (data.counts("test")[data.counts("train") == 0] == 0).all()
    assert data.test.sizes.min() >= 90
    assert len(np.unique(data.test.flat)) == len(data.test.flat)
