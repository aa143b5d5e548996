"""The methods. A new one is a file here and a line in `METHODS`; the file is imported when its method is asked for."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from personafl.algorithms.training import Training
from personafl.core.algorithm import Algorithm
from personafl.options import describe

__all__ = ["METHODS", "Method", "Training"]


@dataclass(frozen=True)
class Method:
    """A method that recipes can name: a builder of this name in a module here, documented by its docstring."""

    name: str
    module: str
    paper: str

    @property
    def build(self) -> Callable[..., Algorithm]:
        """`build(training, **its own options)`."""
        found: Callable[..., Algorithm] = vars(importlib.import_module(f"{__name__}.{self.module}"))[self.name]
        return found

    @property
    def summary(self) -> str:
        """The first line of the builder's docstring."""
        return (self.build.__doc__ or "").splitlines()[0]

    @property
    def options(self) -> str:
        """The method's own options with their defaults."""
        return describe(self.build)


METHODS: dict[str, Method] = {
    name: Method(name, module, paper)
    for name, module, paper in (
        ("fedavg", "fedavg", "McMahan et al., AISTATS 2017"),
        ("fedprox", "fedprox", "Li et al., MLSys 2020"),
        ("fedavgm", "fedopt", "Hsu et al., 2019"),
        ("fedadam", "fedopt", "Reddi et al., ICLR 2021"),
        ("fedyogi", "fedopt", "Reddi et al., ICLR 2021"),
        ("fedadagrad", "fedopt", "Reddi et al., ICLR 2021"),
        ("feddyn", "feddyn", "Acar et al., ICLR 2021"),
        ("scaffold", "scaffold", "Karimireddy et al., ICML 2020"),
        ("local", "local", "baseline"),
        ("finetune", "finetune", "Pillutla et al., ICML 2022 (baseline)"),
        ("ditto", "ditto", "Li et al., ICML 2021"),
        ("mrmtl", "mrmtl", "Liu et al., NeurIPS 2022"),
        ("pfedme", "pfedme", "Dinh et al., NeurIPS 2020"),
        ("perfedavg", "perfedavg", "Fallah et al., NeurIPS 2020"),
        ("fedslr", "fedslr", "Huang et al., TMLR 2023"),
        ("fedbcd", "fedbcd", "Wu et al., 2021"),
        ("fedbcdi", "fedbcd", "Wu et al., 2021"),
        ("quped", "quped", "Ozkara et al., NeurIPS 2021"),
        ("qupel", "qupel", "Ozkara et al., 2021"),
        ("binaryrelax", "binaryrelax", "Yin et al., SIAM J. Imaging Sci. 2018"),
        ("fml", "fml", "Shen et al., 2020"),
        ("fedalt", "fedalt", "Pillutla et al., ICML 2022"),
        ("fedsim", "fedalt", "Pillutla et al., ICML 2022"),
        ("fedper", "fedper", "Arivazhagan et al., 2019"),
        ("fedrep", "fedper", "Collins et al., ICML 2021"),
        ("lgfedavg", "fedper", "Liang et al., 2020"),
        ("fedbn", "fedper", "Li et al., ICLR 2021"),
        ("fedrod", "fedrod", "Chen and Chao, ICLR 2022"),
        ("fedbabu", "fedbabu", "Oh et al., ICLR 2022"),
        ("fedala", "fedala", "Zhang et al., AAAI 2023"),
        ("feddbe", "feddbe", "Zhang et al., NeurIPS 2023"),
        ("fedcp", "fedcp", "Zhang et al., KDD 2023"),
        ("gpfl", "gpfl", "Zhang et al., ICCV 2023"),
        ("fedproto", "fedproto", "Tan et al., AAAI 2022"),
        ("fedpac", "fedpac", "Xu et al., ICLR 2023"),
        ("ifca", "ifca", "Ghosh et al., NeurIPS 2020"),
        ("fedem", "fedem", "Marfoq et al., NeurIPS 2021"),
        ("pfedhn", "pfedhn", "Shamsian et al., ICML 2021"),
        ("fedfomo", "fedfomo", "Zhang et al., ICLR 2021"),
        ("apfl", "apfl", "Deng et al., 2020"),
        ("fedspa", "fedspa", "Huang et al., 2022"),
    )
}
