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
from typing import Any

import torch
from torch import nn

from sglang_eagle3_ext import assembly
from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.spec import AssemblyPlan, Boundary

logger = logging.getLogger(__name__)

_STATES = "eagle3_ext_states"
"""Attribute of a ForwardBatch that holds the states captured in its pass, keyed by boundary."""


_STACKS = frozenset({"sglang.srt.models.llama.LlamaModel"})
"""Classes whose layers all enter through an attention stage and whose last state leaves through
``residual_batch.final_norm``, heirs included."""

_at_final_norm: dict[int, AssemblyPlan] = {}
"""Final norms whose input or output a plan wants, by identity. Targets live as long as their process."""


def configure_capture(original: Callable[..., None], **call: Any) -> None:
    """Install our capture when a plan of ours arrives (AROUND ``configure_aux_hidden_state_capture``)."""
    plan = call.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(plan, AssemblyPlan):
        original(**call)
        return
    model = call["model"]
    found = find_language_model(model)
    if found is not None:
        install(*found, plan)
        return
    # A class that is not captured by boundary yet: stock's own capture, told in its own ids what is wanted.
    if plan.stock_ids is None:
        raise UnsupportedError(
            f"{plan.target.path}: {type(model).__name__} cannot emit "
            f"{', '.join(assembly.spell(b, plan.target.num_layers) for b in plan.capture)}; this version captures by "
            "boundary on Llama-type targets only, and no id list of stock's reaches these states here. "
            "Use a draft trained on states this class emits."
        )
    original(**{**call, "eagle_aux_hidden_state_layer_ids": list(plan.stock_ids)})


def find_language_model(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Find, in a target as SGLang loaded it, the causal language model and its stack of layers.

    Returns:
        (the module with the logits processor, the module with the layers and the final norm), the former
        owning the latter as ``model``; ``None`` when the stack is of a class not captured by boundary.
    """
    for owner in model.modules():
        stack = getattr(owner, "model", None)
        if (
            isinstance(stack, nn.Module)
            and isinstance(getattr(owner, "logits_processor", None), nn.Module)
            and any(f"{c.__module__}.{c.__qualname__}" in _STACKS for c in type(stack).__mro__)
        ):
            return owner, stack
    return None


def install(owner: nn.Module, stack: nn.Module, plan: AssemblyPlan) -> None:
    """Put a capture point at every boundary of the plan and hand the states to the logits processor.

    Args:
        owner: the causal language model, see :func:`find_language_model`.
        stack: the module that holds its decoder layers and its final norm.
        plan: what to capture.

    Raises:
        UnsupportedError: this rank holds fewer layers than the plan was made for.
    """
    layers: Any = stack.layers
    if len(layers) != plan.target.num_layers:
        raise UnsupportedError(
            f"{plan.target.path}: got {len(layers)} decoder layers on this rank; expected all "
            f"{plan.target.num_layers}. Serve with pipeline parallel size 1."
        )
    # Stock's own capture stays off: its collectors would run a second time, under its own conventions.
    owner.capture_aux_hidden_states = False  # type: ignore[assignment]
    for boundary in plan.capture:
        if boundary == "final_norm" or boundary == plan.target.num_layers:
            _at_final_norm[id(stack.norm)] = plan
        else:
            _capture_before_layer(layers[boundary].attn_boundary, boundary)
    processor: Any = owner.logits_processor
    processor.register_forward_pre_hook(_hand_over(plan), with_kwargs=True)


def _capture_before_layer(stage: Any, boundary: int) -> None:
    """Ask one attention stage for the residual stream each time it prepares its input."""
    prepare = stage.prepare

    def prepare_and_capture(hidden_states: Any, forward_batch: Any, **call: Any) -> Any:
        call["capture"] = _chain(call.get("capture"), _keep(forward_batch, boundary))
        return prepare(hidden_states, forward_batch, **call)

    stage.prepare = prepare_and_capture


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
