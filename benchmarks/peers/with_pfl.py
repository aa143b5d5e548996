"""Apple's pfl (`pip install pfl`): its simulated backend, clients one after another in one process.

It does not shuffle a client's samples, which is less work than the others do.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from loops import loss_of
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from work import Work, clients_of, start_of

__all__ = ["Pfl"]


class _Alternating(FederatedAveraging):  # type: ignore[misc]
    """FedAlt in pfl: its SGD on the personal part, then on the rest; personal parts are kept here."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.head, self.own = head, {}

    def train_one_user(self, initial_model_state, model, user_dataset, central_context):  # type: ignore[no-untyped-def]
        mine = {n: p for n, p in model.variable_map.items() if n.startswith(self.head)}
        with torch.no_grad():
            for name, value in self.own.get(user_dataset.user_id, {}).items():
                mine[name].copy_(value)
        for part in (True, False):
            for name, p in model.variable_map.items():
                p.requires_grad_((name in mine) == part)
            super().train_one_user(initial_model_state, model, user_dataset, central_context)
        self.own[user_dataset.user_id] = {n: p.detach().clone() for n, p in mine.items()}
        with torch.no_grad():
            for name, p in mine.items():
                p.copy_(initial_model_state[name])
        return model.get_model_difference(initial_model_state), Metrics()


class Pfl:
    """One algorithm; a round is a run of one iteration more."""

    methods = ("fedavg", "fedalt")

    def __init__(self, work: Work, method: str) -> None:
        self.work = work
        clients = clients_of(work)
        module = start_of(work)
        plain = replace(work, bfloat16=False)  # for pfl rounds by itself
        module.loss = lambda x, y: loss_of(plain, module, x, y)  # type: ignore[assignment]
        module.metrics = lambda x, y: {}  # type: ignore[assignment]
        self.model = PyTorchModel(
            module,
            functools.partial(torch.optim.SGD, **work.sgd()),
            torch.optim.SGD(module.parameters(), lr=1.0),
            amp_dtype=torch.bfloat16 if work.bfloat16 else None,
        )
        users = {str(n): Dataset(client, user_id=str(n)) for n, client in enumerate(clients)}
        sampler = MinimizeReuseUserSampler(list(users))
        self.backend = SimulatedBackend(
            FederatedDataset(users.__getitem__, sampler), None, postprocessors=[WeightByDatapoints()]
        )
        self.algorithm = FederatedAveraging() if method == "fedavg" else _Alternating(work.head)
        self.rounds = 0

    def round(self) -> None:
        self.rounds += 1
        settings = NNAlgorithmParams(
            central_num_iterations=self.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=self.work.clients,
            val_cohort_size=None,
        )
        training = NNTrainHyperParams(
            local_num_epochs=self.work.epochs,
            local_learning_rate=self.work.rate(self.rounds - 1),
            local_batch_size=self.work.batch,
        )
        self.algorithm.run(settings, self.backend, self.model, training, send_metrics_to_platform=False)

    def result(self) -> dict[str, Tensor]:
        """Return the shared model."""
        return {name: p.detach() for name, p in self.model.variable_map.items()}
