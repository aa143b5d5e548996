"""Compressed uploads with error feedback, for any method: what a message leaves out is added to the next one.

F. Seide et al., *1-Bit Stochastic Gradient Descent*, Interspeech 2014; S. U. Stich et al., *Sparsified SGD with
Memory*, NeurIPS 2018; S. P. Karimireddy et al., *Error Feedback Fixes SignSGD*, ICML 2019; T. Vogels et al.,
*PowerSGD*, NeurIPS 2019 (low rank). FedSLR's paper leaves its dense uplink to such a technique (footnote 2). For every
weight of an upload,

    client i:  a = up_i + e_i,   sent = C(a),   e_i ← a − sent;   e_i starts at 0
    server:    as if `sent` were up_i

so over any rounds Σ sent + e_i = Σ up_i: nothing is lost, only late. C is one of `uploads.codecs`. A weight whose
compact form would not be smaller in bytes, names and shapes of the parts included, is sent whole and has no e_i; so are
single numbers, such as the loss, and what the method itself sends in a compact form. Without error feedback, e_i = 0
throughout.

FedAvg with one full-batch step and everyone taking part: w̃ = w + Σ p_i e_i moves by exactly the uncompressed step
−η Σ p_i ∇f_i(w), and e_i is of the order of η. So w comes as near to the optimum as is in proportion to η; all the way
if all ∇f_i vanish there. Without error feedback w may stall anywhere, whatever η: entries on which clients disagree,
and which cancel in the mean, can crowd out the others for ever.

What a method keeps on the device is made of its uncompressed upload.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from personafl.core import tree, wire
from personafl.core.algorithm import Algorithm, Problem, only_by_gradients, untrained_upload
from personafl.core.batches import Data
from personafl.core.tree import Params, Tree
from personafl.uploads.aroundclient import AroundClient
from personafl.uploads.codecs import Codec, Compression, Whole


class WithError(NamedTuple):
    """State of a client: the method's own, and e_i by its path in the upload. Both stay on the device."""

    state: Tree
    error: Params


@dataclass(frozen=True, kw_only=True)
class CompressedClient(AroundClient):
    """Client rule: another one's, with its uploads compressed."""

    codec: Compression

    @property
    def by_gradients(self) -> bool:  # type: ignore[override]
        """As the method: what is compressed was trained before."""
        return only_by_gradients(self.rule)

    @property
    def offline(self) -> Callable[[Problem, WithError, Data], WithError] | None:
        """As the method, if it has that: nothing is sent, so e_i stays."""
        own = self.rule.offline
        if own is None:
            return None
        return lambda problem, state, data: state._replace(state=own(problem, state.state, data))

    @property
    def introduce(self) -> Callable[[Problem, WithError], Tree] | None:
        """As the method's own, whole."""
        own = self.rule.introduce
        return None if own is None else lambda problem, state: own(problem, state.state)

    @property
    def packed(self) -> Callable[[Problem, Any, Tree], dict[str, tuple[Tree, ...]]] | None:
        """As the method."""
        own = self.rule.packed
        return None if own is None else lambda problem, message, state: own(problem, message, _own(state))

    def init(self, problem: Problem, down: Any, generator: torch.Generator) -> WithError:
        """The method's state, and e_i = 0."""
        own = self.rule.init(problem, down, generator)
        error: Params = {}
        if self.codec.error_feedback:
            upload = untrained_upload(self.rule, problem, down, own)
            entries = pytree.tree_leaves_with_path(upload, is_leaf=wire.is_form)
            error = {tree.path_name(path): torch.zeros_like(leaf) for path, leaf in entries if _pays(self.codec, leaf)}
        return WithError(own, error)

    def update(self, problem: Problem, down: Any, state: WithError, data: Data) -> tuple[WithError, Tree]:
        """Send C(up_i + e_i) in place of up_i."""
        own, upload = self.rule.update(problem, down, state.state, data)
        left: Params = {}

        def send(path: Any, leaf: Tree) -> Tree:
            if not _pays(self.codec, leaf):
                return leaf
            name = tree.path_name(path)
            sent, rest = self.codec.divide(leaf + state.error[name] if self.codec.error_feedback else leaf)
            left[name] = rest
            return sent

        sent = pytree.tree_map_with_path(send, upload, is_leaf=wire.is_form)
        return WithError(own, left if self.codec.error_feedback else {}), sent

    def personalize(self, problem: Problem, down: Any, state: WithError, data: Data) -> Tree:
        """As the method, whose own state it returns: nothing is sent any more."""
        return self.rule.personalize(problem, down, state.state, data)

    def models(self, problem: Problem, down: Any, state: Tree) -> dict[str, Params]:
        """As the method, from a state between rounds or after fine-tuning."""
        return self.rule.models(problem, down, _own(state))


def compressed(algorithm: Algorithm, codec: Codec) -> Algorithm:
    """Return the method with compressed uploads; its server does not notice."""
    if isinstance(codec, Whole):
        return algorithm
    return dataclasses.replace(algorithm, client=CompressedClient(rule=algorithm.client, codec=codec))


def _own(state: Tree) -> Tree:
    return state.state if isinstance(state, WithError) else state


def _pays(codec: Compression, leaf: Tree) -> bool:
    """Say whether a leaf of an upload is to be compressed: by its shape and type alone."""
    if wire.is_form(leaf) or not leaf.is_floating_point() or leaf.numel() < 2:
        return False
    return _is_smaller(codec, leaf.shape, leaf.dtype)


@functools.lru_cache(maxsize=4096)
def _is_smaller(codec: Compression, shape: torch.Size, dtype: torch.dtype) -> bool:
    weight = torch.empty(shape, dtype=dtype, device="meta")  # no data: only the sizes of the parts are asked for
    return wire.size({"weight": codec.divide(weight)[0]}) < wire.size({"weight": weight})
