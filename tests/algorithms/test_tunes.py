"""What methods declare to be tuned: real options, with their defaults inside ranges that are valid at both ends."""

import pytest

from personafl.algorithms import METHODS
from personafl.algorithms.training import Between, Training
from personafl.core.optim import Sgd
from personafl.options import checked, defaults


@pytest.mark.parametrize("name", METHODS)
def test_a_method_tunes_options_that_it_has_over_ranges_that_hold_their_defaults(name: str) -> None:
    build, training = METHODS[name].build, Training(optimizer=Sgd(lr=0.25))
    ranges: dict[str, Between] = getattr(build, "tunes", {})
    assert len(ranges) <= 2  # with the learning rate as many as a dozen trials can tell apart
    for option, between in ranges.items():
        assert 0 <= between.low < between.high
        assert between.low > 0 or not between.log
        scale = 0.25 if between.of_lr else 1
        for end in (between.low, between.high):
            build(training, **checked(build, {option: scale * end}, "method"))
        default = defaults(build)[option]
        if between.of_lr and default is None:
            assert build(training, **{option: 0.25 * between.of_lr}) == build(training)
        else:
            assert between.low <= default / scale <= between.high
            assert isinstance(default, int) == isinstance(between.low, int) == isinstance(between.high, int)
