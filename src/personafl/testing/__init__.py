"""For whoever writes a method: `check_algorithm(my_algorithm)` holds it to the laws."""

from personafl.testing.case import SIZES, TOLERANCE, Case, close, everything, make_case
from personafl.testing.laws import LAWS, check_algorithm

__all__ = ["LAWS", "SIZES", "TOLERANCE", "Case", "check_algorithm", "close", "everything", "make_case"]
