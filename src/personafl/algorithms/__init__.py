"""The methods. A new one is a file here and a line in `METHODS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from personafl.algorithms.apfl import apfl
from personafl.algorithms.binaryrelax import binaryrelax
from personafl.algorithms.ditto import ditto
from personafl.algorithms.fedalt import fedalt, fedsim
from personafl.algorithms.fedavg import fedavg
from personafl.algorithms.fedbcd import fedbcd, fedbcdi
from personafl.algorithms.fedbn import fedbn
from personafl.algorithms.feddyn import feddyn
from personafl.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from personafl.algorithms.fedper import fedper
from personafl.algorithms.fedprox import fedprox
from personafl.algorithms.fedrep import fedrep
from personafl.algorithms.fedslr import fedslr
from personafl.algorithms.fedspa import fedspa
from personafl.algorithms.finetune import finetune
from personafl.algorithms.fml import fml
from personafl.algorithms.lgfedavg import lgfedavg
from personafl.algorithms.local import local
from personafl.algorithms.perfedavg import perfedavg
from personafl.algorithms.pfedme import pfedme
from personafl.algorithms.quped import quped
from personafl.algorithms.qupel import qupel
from personafl.algorithms.scaffold import scaffold
from personafl.algorithms.training import Training
from personafl.core.algorithm import Algorithm
from personafl.options import describe

__all__ = ["METHODS", "Method", "Training"]


@dataclass(frozen=True)
class Method:
    """A method that recipes can name: `build(training, **its own fields)`, documented by its docstring."""

    build: Callable[..., Algorithm]
    paper: str

    @property
    def summary(self) -> str:
        """The first line of the builder's docstring."""
        return (self.build.__doc__ or "").splitlines()[0]

    @property
    def options(self) -> str:
        """The method's own options with their defaults."""
        return describe(self.build)


METHODS: dict[str, Method] = {
    "fedavg": Method(fedavg, "McMahan et al., AISTATS 2017"),
    "fedprox": Method(fedprox, "Li et al., MLSys 2020"),
    "fedavgm": Method(fedavgm, "Hsu et al., 2019"),
    "fedadam": Method(fedadam, "Reddi et al., ICLR 2021"),
    "fedyogi": Method(fedyogi, "Reddi et al., ICLR 2021"),
    "fedadagrad": Method(fedadagrad, "Reddi et al., ICLR 2021"),
    "feddyn": Method(feddyn, "Acar et al., ICLR 2021"),
    "scaffold": Method(scaffold, "Karimireddy et al., ICML 2020"),
    "local": Method(local, "baseline"),
    "finetune": Method(finetune, "Pillutla et al., ICML 2022 (baseline)"),
    "ditto": Method(ditto, "Li et al., ICML 2021"),
    "pfedme": Method(pfedme, "Dinh et al., NeurIPS 2020"),
    "perfedavg": Method(perfedavg, "Fallah et al., NeurIPS 2020"),
    "fedslr": Method(fedslr, "Huang et al., TMLR 2023"),
    "fedbcd": Method(fedbcd, "Wu et al., 2021"),
    "fedbcdi": Method(fedbcdi, "Wu et al., 2021"),
    "quped": Method(quped, "Ozkara et al., NeurIPS 2021"),
    "qupel": Method(qupel, "Ozkara et al., 2021"),
    "binaryrelax": Method(binaryrelax, "Yin et al., SIAM J. Imaging Sci. 2018"),
    "fml": Method(fml, "Shen et al., 2020"),
    "fedalt": Method(fedalt, "Pillutla et al., ICML 2022"),
    "fedsim": Method(fedsim, "Pillutla et al., ICML 2022"),
    "fedper": Method(fedper, "Arivazhagan et al., 2019"),
    "fedrep": Method(fedrep, "Collins et al., ICML 2021"),
    "lgfedavg": Method(lgfedavg, "Liang et al., 2020"),
    "fedbn": Method(fedbn, "Li et al., ICLR 2021"),
    "apfl": Method(apfl, "Deng et al., 2020"),
    "fedspa": Method(fedspa, "Huang et al., 2022"),
}
