"""Rules and what is done before them, by the names that recipes use."""

from personafl.robust.choosing import Bulyan, Krum, Mda, MultiKrum, Smea
from personafl.robust.coordinates import Meamed, Median, TrimmedMean
from personafl.robust.mixing import Arc, Bucketing, NearestNeighbours
from personafl.robust.rule import Mix, Rule
from personafl.robust.weighing import Caf, CenteredClipping, GeometricMedian, Mean

RULES: dict[str, type[Rule]] = {
    "mean": Mean,
    "median": Median,
    "trimmed-mean": TrimmedMean,
    "geometric-median": GeometricMedian,
    "krum": Krum,
    "multi-krum": MultiKrum,
    "centered-clipping": CenteredClipping,
    "mda": Mda,
    "meamed": Meamed,
    "caf": Caf,
    "smea": Smea,
    "bulyan": Bulyan,
}
MIXES: dict[str, type[Mix]] = {"nnm": NearestNeighbours, "bucketing": Bucketing, "arc": Arc}
