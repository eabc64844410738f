"""Capture the target's residual stream at the boundaries of a plan.

The stream is taken where SGLang itself materialises it: at the entry of a layer's attention stage
(``attn_boundary.prepare(capture=...)`` hands out boundary b before layer b runs) and at the final norm
(``residual_batch.final_norm(capture=...)`` hands out boundary n). The states of one forward pass travel on
its ``ForwardBatch`` and reach the logits processor as ``aux_hidden_states``, the way stock's own captures do.
A target class's id conventions, defaults and collectors are never involved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sglang_eagle3_ext import assembly
from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.spec import AssemblyPlan, Boundary

logger = logging.getLogger(__name__)

_STATES = "eagle3_ext_states"
"""Attribute of a ForwardBatch that holds the states captured in its pass, keyed by boundary."""


@dataclass
class Capture:
    """The capture points installed on one target."""

    plan: AssemblyPlan
    norm: nn.Module
    handles: list[Any] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def remove(self) -> None:
        """Take every capture point off the target again."""
        _at_final_norm.pop(id(self.norm), None)
        for handle in self.handles:
            handle.remove()
        for step in self.undo:
            step()


_at_final_norm: dict[int, AssemblyPlan] = {}
"""Final norms whose input or output a plan wants, by identity. Targets live as long as their process."""


def configure_capture(original: Callable[..., None], **call: Any) -> None:
    """Install our capture when a plan of ours arrives (AROUND ``configure_aux_hidden_state_capture``)."""
    plan = call.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(plan, AssemblyPlan):
        original(**call)
        return
    model = call["model"]
    stack = find_stack(model)
    if stack is not None:
        install(model, stack, plan)
        return
    # A target outside the layer_boundary machinery: stock's own capture, told what it must capture.
    if plan.stock_ids is None:
        raise UnsupportedError(
            f"{plan.target.path}: {type(model).__name__} cannot emit "
            f"{', '.join(assembly.spell(b, plan.target.num_layers) for b in plan.capture)}; its layers stand "
            "outside SGLang's layer_boundary machinery and no id list of stock's reaches these states. "
            "Use a draft trained on states this class emits."
        )
    original(**{**call, "eagle_aux_hidden_state_layer_ids": list(plan.stock_ids)})


def find_stack(model: nn.Module) -> nn.Module | None:
    """Find the module that owns a target's decoder layers, when each of them has an attention boundary."""
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if (
            isinstance(layers, nn.ModuleList)
            and len(layers)
            and all(hasattr(layer, "attn_boundary") for layer in layers)
            and isinstance(getattr(module, "norm", None), nn.Module)
        ):
            return module
    return None


def install(model: nn.Module, stack: nn.Module, plan: AssemblyPlan) -> Capture:
    """Put a capture point at every boundary of the plan and hand the states to the logits processor.

    Args:
        model: the target as SGLang loaded it; has a ``logits_processor``.
        stack: the module that owns its decoder layers and its final norm, see :func:`find_stack`.
        plan: what to capture.

    Raises:
        UnsupportedError: the target has no logits processor to hand the states to, or fewer layers than
            the plan was made for.
    """
    layers: Any = stack.layers
    if len(layers) != plan.target.num_layers:
        raise UnsupportedError(
            f"{plan.target.path}: got {len(layers)} decoder layers on this rank; expected all "
            f"{plan.target.num_layers}. Serve with pipeline parallel size 1."
        )
    processor = getattr(model, "logits_processor", None)
    if not isinstance(processor, nn.Module):
        raise UnsupportedError(
            f"{plan.target.path}: {type(model).__name__} has no logits_processor; expected a causal "
            "language model. Serve it without speculation."
        )
    # Stock's own capture stays off: its collectors would run a second time, under its own conventions.
    model.capture_aux_hidden_states = False  # type: ignore[assignment]
    capture = Capture(plan=plan, norm=stack.norm)  # type: ignore[arg-type]
    for boundary in plan.capture:
        if boundary == "final_norm" or boundary == plan.target.num_layers:
            _at_final_norm[id(stack.norm)] = plan
        else:
            capture.undo.append(_capture_before_layer(layers[boundary].attn_boundary, boundary))
    capture.handles.append(
        processor.register_forward_pre_hook(_hand_over(plan), with_kwargs=True),
    )
    return capture


def _capture_before_layer(stage: Any, boundary: int) -> Callable[[], None]:
    """Ask one attention stage for the residual stream each time it prepares its input."""
    prepare = stage.prepare

    def prepare_and_capture(hidden_states: Any, forward_batch: Any, **call: Any) -> Any:
        call["capture"] = _chain(call.get("capture"), _keep(forward_batch, boundary))
        return prepare(hidden_states, forward_batch, **call)

    stage.prepare = prepare_and_capture
    return lambda: delattr(stage, "prepare")


def final_norm(
    original: Callable[..., Any],
    hidden_states: Any,
    forward_batch: Any,
    layernorm: nn.Module,
    capture: Callable[..., None] | None = None,
    **call: Any,
) -> Any:
    """Take boundary n and the normed state where a plan wants them (AROUND ``residual_batch.final_norm``)."""
    plan = _at_final_norm.get(id(layernorm))
    if plan is None:
        return original(hidden_states, forward_batch, layernorm, capture, **call)
    last = plan.target.num_layers
    if last in plan.capture:
        capture = _chain(capture, _keep(forward_batch, last))
    normed = original(hidden_states, forward_batch, layernorm, capture, **call)
    if "final_norm" in plan.capture:
        _keep(forward_batch, "final_norm")(normed)
    return normed


def _keep(forward_batch: Any, boundary: Boundary) -> Callable[..., None]:
    """Return a capture callback that stores a state on the batch; copies what it does not own."""

    def keep(value: torch.Tensor, *, owned: bool = False) -> None:
        states = forward_batch.__dict__.setdefault(_STATES, {})
        states[boundary] = value if owned else value.clone()

    return keep


def _chain(first: Callable[..., None] | None, second: Callable[..., None]) -> Callable[..., None]:
    """Call both capture callbacks; only a sole callback may adopt owned storage."""
    if first is None:
        return second

    def both(value: torch.Tensor, *, owned: bool = False) -> None:
        first(value)
        second(value, owned=owned)

    return both


def _hand_over(plan: AssemblyPlan) -> Callable[..., Any]:
    """Build the logits processor's pre-hook: it receives the captured states in capture order."""

    def hand_over(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        input_ids, hidden_states, lm_head, forward_batch, *rest = args
        states = forward_batch.__dict__.pop(_STATES, {})
        if len(states) != len(plan.capture):
            missing = [b for b in plan.capture if b not in states]
            raise RuntimeError(
                f"{plan.target.path}: captured {len(states)} of {len(plan.capture)} states; missing "
                + ", ".join(assembly.spell(b, plan.target.num_layers) for b in missing)
                + ". This forward path bypasses SGLang's layer boundaries; please report it."
            )
        kwargs["aux_hidden_states"] = [states[b] for b in plan.capture]
        return (input_ids, hidden_states, lm_head, forward_batch, *rest[1:]), kwargs

    return hand_over
