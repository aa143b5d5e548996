"""All that is put in the place of core's definitions (`core.seam`), and how executors do so."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from personafl.core import batches, descend, losses, net, prox, reduced, samples, seam, tree
from personafl.fast import gradient, minibatches, network, singular, skipping, sums, training
from personafl.fast import losses as stacked_losses


def _of_samples(name: str) -> Callable[..., Any]:
    """Return a function of `fast.samples`, which is imported by whoever calls it: few clients protect samples."""

    def function(*given: Any, **named: Any) -> Any:
        from personafl.fast import samples as protected

        return getattr(protected, name)(*given, **named)

    return function


FASTER: seam.Table = {
    descend.gradient_and_value: gradient.gradient_and_value,
    descend.pullback: gradient.pullback,
    descend.moved: gradient.moved,
    descend.descend: training.descend,
    descend.descent: training.descent,
    descend.descend_from: training.descend_from,
    batches.Batches.each: minibatches.each,
    net.Net.called: network.called,
    losses.MeanLoss.__call__: stacked_losses.mean_loss,
    losses.mean_of_real: stacked_losses.mean_of_real,
    losses.divergence: stacked_losses.divergence,
    losses.cross_entropy: stacked_losses.cross_entropy,
    reduced.weighted_sum: sums.weighted_sum,
    tree.when: skipping.when,
    prox.nuclear: singular.nuclear,
    samples.clipped_sums: _of_samples("clipped_sums"),
    samples.noisy_mean: _of_samples("noisy_mean"),
}


@contextmanager
def enabled() -> Iterator[None]:
    """Have core compute in these ways, in this thread, until left; also a decorator."""
    with seam.using(FASTER):
        yield
