# SPDX-License-Identifier: BSD-3-Clause
"""The quantizer for torchao's PT2E flow, with HTP's rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchao.quantization.pt2e import ObserverOrFakeQuantize
from torchao.quantization.pt2e.quantizer import EdgeOrNode, Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from ..errors import RecipeError
from ..target import Target
from .annotate import Annotator, described, module_paths
from .arch import refused
from .batch_norm import open_batch_norms
from .families import is_float
from .functional import attribute, functional
from .observers import FakeFollower, Follower
from .recipe import Bits, QuantRecipe, Spec
from .transforms import finite_masks, open_attention

Node = torch.fx.Node


class QnnQuantizer(Quantizer):  # type: ignore[misc]
    """For torchao's `prepare_pt2e` and `prepare_qat_pt2e`.

    One quantizer may prepare several modules, the methods of a program.  What they write to a
    buffer of one name (or one slot, see `slots`) has one encoding in all of them: prepare all,
    calibrate all, then convert.

    Args:
        recipe: name of a recipe (`8a8w`, `16a8w`, `16a4w`, `16a4w_block`, `16a16w`), or a
            `QuantRecipe`.
        target: the SoC; what its NPU cannot do in integers is left in fp16 and listed in `left`.
        qat: for `prepare_qat_pt2e`: modules are given fake-quantizers to train with.

    Attributes:
        slots: buffer to slot, of the module that is prepared next; those of other names are their
            own slots if the module writes them.
        left: nodes that the recipe quantizes and the target does not, and why.
        made: nodes, and edges as (value, reader), of the module that was prepared last, to their
            observers.

    Raises:
        RecipeError: there is no such recipe, or the target cannot run it.
    """

    def __init__(
        self,
        recipe: QuantRecipe | str,
        *,
        target: Target | str | None = None,
        qat: bool = False,
    ) -> None:
        super().__init__()
        self.recipe = QuantRecipe.of(recipe)
        self.target = Target(target) if isinstance(target, str) else target
        self.qat = qat
        self.slots: Mapping[str, str] = {}
        self.left: list[tuple[str, str]] = []
        self.made: Mapping[EdgeOrNode, ObserverOrFakeQuantize] = {}
        self._observers: dict[str, Any] = {}

    def transform_for_annotation(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Rewrites in-place updates, attention and masks; see `functional` and `transforms`.

        With `qat`, batch norms too; see `batch_norm`.
        """
        if self.qat:
            open_batch_norms(model, self._integer)
        model = functional(model)
        open_attention(model, lambda n: self._bits(n) is not None)
        finite_masks(model, lambda n: None if (b := self._bits(n)) is None else b.activations)
        return model

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        annotator = Annotator(
            model,
            self.recipe,
            slot_of=self.slots.get,
            qat=self.qat,
            accepts=self._refused,
            left=lambda node, why: self.left.append((described(node), why)),
        )
        annotator.run()
        return model

    def validate(self, model: torch.fx.GraphModule) -> None:
        """All that is annotated can be lowered: what HTP has no integers for runs in fp16."""

    def prepare_obs_or_fq_callback(
        self,
        model: torch.fx.GraphModule,
        edge_or_node_to_obs_or_fq: dict[EdgeOrNode, ObserverOrFakeQuantize],
    ) -> None:
        """Ties encodings: of buffers in all modules, and of what follows another value."""
        made = edge_or_node_to_obs_or_fq
        specs = {at: _spec_of(at) for at in made}
        for at, spec in specs.items():
            if isinstance(spec, Spec):
                for slot in sorted(spec.slots):
                    self._tie(model, made[at], slot)
        followers: dict[int, Any] = {}
        for at, spec in specs.items():
            if isinstance(spec, Spec) and spec.leader is not None:
                leader = made[spec.leader]
                if id(leader) not in followers:
                    followers[id(leader)] = (FakeFollower if self.qat else Follower)(leader)
                made[at] = followers[id(leader)]
        self.made = dict(made)

    def _tie(self, model: torch.fx.GraphModule, observer: Any, slot: str) -> None:
        """Has what a buffer is given, in any module, one range, with its registered value in it."""
        own = _range_of(observer)
        shared = self._observers.setdefault(slot, own)
        if own.dtype is not shared.dtype:
            raise RecipeError(
                f"the buffer {slot} is written in {own.dtype} by one method and in {shared.dtype} "
                "by another: give the methods one recipe there, or the buffer bits of its own with "
                "QuantRecipe(state={name: bits})"
            )
        own.become(shared)
        names = {s: name for name, s in self.slots.items()}
        shared.include(attribute(model, names.get(slot, slot)))

    def _bits(self, node: Node) -> Bits | None:
        if not isinstance(node.target, torch._ops.OpOverload) or not is_float(node):
            return None
        return self.recipe.bits(node.target, module_paths(node))

    def _integer(self, node: Node) -> bool:
        """Whether a node is computed in integers."""
        bits = self._bits(node)
        return bits is not None and self._refused(node, bits) is None

    def _refused(self, node: Node, bits: Bits) -> str | None:
        return None if self.target is None else refused(self.target, node, bits)


def _spec_of(at: EdgeOrNode) -> Any:
    node = at[1] if isinstance(at, tuple) else at
    annotation = node.meta[Q_ANNOTATION_KEY]
    return annotation.input_qspec_map[at[0]] if isinstance(at, tuple) else annotation.output_qspec


def _range_of(observer: Any) -> Any:
    """The observer of ranges in an observer or a fake-quantizer."""
    return getattr(observer, "activation_post_process", observer)
