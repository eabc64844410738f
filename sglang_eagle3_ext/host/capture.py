"""Capture the target's residual stream at the boundaries of a plan.

The stream is taken where SGLang itself materialises it: at the entry of a layer's attention stage (the ``capture``
options of ``attn_boundary.prepare`` hand out boundary b before layer b runs) and at the final norm
(``residual_batch.final_norm(capture=...)`` hands out boundary n). The state after the final norm is what the stack of
layers returns. Captured states leave the stack beside it, the way stock's own captures do, so that a CUDA graph over
the stack keeps them among its outputs; stock's id conventions, defaults and collectors are never involved.

One class stands outside that machinery: Gemma-3's layers hand a contribution and the residual it belongs to from one
to the next, and the stream is their sum.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sglang_eagle3_ext import assembly
from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host.switches import STOCK_INSTEAD
from sglang_eagle3_ext.spec import AssemblyPlan, Boundary

OTHER_ROWS = (
    "No draft can be fed with that. Leave out --moe-a2a-backend, which deals the target's rows out to ranks, or "
    f"{STOCK_INSTEAD}. Please report it with the server's flags."
)
"""What helps where states come in other rows than the target's output, or not at all: not to leave out the proof."""


def configure_capture(original: Callable[..., None], **call: Any) -> None:
    """Install our capture when a plan of ours arrives (AROUND ``configure_aux_hidden_state_capture``)."""
    plan = call.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(plan, AssemblyPlan):
        install(call["model"], plan)
    else:
        original(**call)


def find_language_model(model: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Find, in a target as SGLang loaded it, its stack of decoder layers and the module that runs the stack.

    Returns:
        (the module whose forward takes captured states from the stack and hands them to the logits processor, the
        module with the layers); ``None`` where SGLang's class has no such pair.
    """
    modules = list(model.modules())
    # Vision towers have layers, too, but none with an attention stage.
    stacks = [m for m in modules if _holds(m, _enters_attention)] or [
        m for m in modules if _holds(m, _carries_residual)
    ]
    if not stacks:
        return None
    stack = stacks[0]
    takers = [m for m in modules if m is not stack and hasattr(m, "capture_aux_hidden_states")]
    around = [m for m in takers if any(inner is stack for inner in m.modules())]
    # A module comes before what it contains, so the last one is the innermost around the stack.
    return (around[-1], stack) if around else None


def _holds(module: nn.Module, is_layer: Callable[[nn.Module], bool]) -> bool:
    """Say whether a module is a stack of such layers."""
    layers = getattr(module, "layers", None)
    return isinstance(layers, nn.ModuleList) and any(map(is_layer, layers))


def _enters_attention(layer: nn.Module) -> bool:
    """Say whether a layer begins with an attention stage of SGLang's."""
    from sglang.srt.layers.layer_boundary.stage import StageBoundary

    return isinstance(getattr(layer, "attn_boundary", None), StageBoundary)


def _carries_residual(layer: nn.Module) -> bool:
    """Say whether a layer takes the residual beside the contribution that is still to be added to it."""
    return "residual" in inspect.signature(type(layer).forward).parameters


def servable(stack: nn.Module) -> tuple[Boundary, ...]:
    """List the states that can be captured on a stack.

    Args:
        stack: the module with the layers, see :func:`find_language_model`.

    Returns:
        Boundaries and ``"final_norm"``, in capture order.
    """
    layers: Any = stack.layers
    n = len(layers)
    if hasattr(stack, "last_hc_hidden_states"):
        # Qwen4-Exp puts streams of its own in the place of captured states, after the logits processor.
        return ()
    if _enters_attention(layers[0]) and not layers[0].attn_boundary.declaration.read.is_plain_norm:
        # Hyper-connections: between layers the stream is several times as wide as the states fc was trained on.
        return 0, n, "final_norm"
    return (*range(n + 1), "final_norm")


def install(model: nn.Module, plan: AssemblyPlan) -> None:
    """Put a capture point at every boundary of the plan and have the stack hand out what they take.

    Args:
        model: the target as SGLang loaded it.
        plan: what to capture.

    Raises:
        UnsupportedError: the class has no stack that can be captured, this rank holds another number of layers than
            the plan was made for, or a state cannot be captured on this class; names the class and what it serves.
    """
    name, n = type(model).__name__, plan.target.num_layers
    found = find_language_model(model)
    if found is None:
        raise UnsupportedError(
            f"{plan.target.path}: got a target of class {name}; expected one whose decoder layers enter through "
            "SGLang's layer boundaries and which hands captured states to its logits processor. Serve it without "
            "EAGLE-3."
        )
    owner, stack = found
    layers: Any = stack.layers
    held = sum(_enters_attention(layer) or _carries_residual(layer) for layer in layers)
    if held != n:
        raise UnsupportedError(
            f"{plan.target.path}: got {held} decoder layers of {name} on this rank; expected all {n}. Serve with "
            "pipeline parallel size 1."
        )
    served = servable(stack)
    lacking = [assembly.spell(b, n) for b in plan.capture if b not in served]
    if lacking:
        serves = ", ".join(assembly.spell(b, n) for b in served)
        raise UnsupportedError(
            f"{plan.target.path}: {name} cannot serve {', '.join(lacking)}; expected sources among "
            f"{serves or 'none: no EAGLE-3 draft can be served on this class'}. Use a draft trained on those."
        )
    states: dict[Boundary, torch.Tensor] = {}
    for boundary in plan.capture:
        if boundary == "final_norm":
            continue
        point = Point(states, boundary)
        by_stage = _enters_attention(layers[0])
        if boundary == n and by_stage:
            stack.norm.eagle3_point = point  # type: ignore[union-attr]
        elif by_stage:
            _wait_at_stage(layers[boundary], stack, point)
        else:
            _wait_at_pair(stack.norm if boundary == n else layers[boundary], point)
    _hand_out(stack, plan, states)
    owner.capture_aux_hidden_states = True  # type: ignore[assignment]


class Point:
    """One capture point: a callback in the shape of SGLang's collectors, which keeps the newest state."""

    def __init__(self, states: dict[Boundary, torch.Tensor], boundary: Boundary) -> None:
        self.states, self.boundary = states, boundary

    def capture(self, value: torch.Tensor, *, owned: bool = False) -> None:
        """Keep a state [T, M]; copy it unless its storage is given away."""
        self.states[self.boundary] = value if owned else value.clone()


def _wait_at_stage(layer: Any, stack: Any, point: Point) -> None:
    """Ask a layer's attention stage for the residual stream each time it prepares its input."""
    stage = layer.attn_boundary
    prepare = stage.prepare
    # Whichever of the two SGLang's own class uses: they order the sum over ranks and the norm differently, and with
    # the other one the target's own output would not stay bit for bit what stock computes.
    option: dict[str, Any] = {"capture_gathered": point} if _gathers(layer, stack) else {"capture": point.capture}

    def prepare_and_capture(hidden_states: Any, forward_batch: Any, **call: Any) -> Any:
        return prepare(hidden_states, forward_batch, **{**call, **option})

    stage.prepare = prepare_and_capture


def _gathers(layer: Any, stack: Any) -> bool:
    """Say whether SGLang's own capture takes what all ranks have gathered, rather than what this one has made.

    Layers that offer both (Qwen3-MoE's) leave it to the stack that calls them.
    """
    offered = inspect.signature(type(layer).forward).parameters
    if "capture_output" not in offered:
        return True
    constants = inspect.unwrap(type(stack).forward).__code__.co_consts
    named = {name for names in constants if isinstance(names, tuple) for name in names}
    return "captured_last_layer_outputs" in named and "capture_output" not in named


def _wait_at_pair(module: Any, point: Point) -> None:
    """Sum the contribution and the residual that enter a layer or a norm beside each other."""

    def sum_pair(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states, residual = args or (kwargs["hidden_states"], kwargs["residual"])
        if residual is None:
            point.capture(hidden_states)
        else:
            point.capture(hidden_states + residual, owned=True)

    module.register_forward_pre_hook(sum_pair, with_kwargs=True)


def final_norm(
    original: Callable[..., Any],
    hidden_states: Any,
    forward_batch: Any,
    layernorm: nn.Module,
    capture: Callable[..., None] | None = None,
    **call: Any,
) -> Any:
    """Take boundary n where a plan wants it (AROUND ``residual_batch.final_norm``)."""
    point: Point | None = getattr(layernorm, "eagle3_point", None)
    return original(hidden_states, forward_batch, layernorm, capture if point is None else point.capture, **call)


def embed_and_head(
    original: Callable[..., tuple[Any, Any]], target_model: nn.Module, *, draft_model: nn.Module | None = None
) -> tuple[Any, Any]:
    """Lend the draft a target's embedding and head (AROUND ``resolve_target_embed_and_head``).

    SGLang's Qwen2-MoE takes ids of EAGLE-3's and then lacks the method that hands these two to a draft.

    Returns:
        This rank's rows of the embedding [V, M] and of the head [V, M].
    """
    if hasattr(target_model, "get_embed_and_head") or not hasattr(draft_model, "plan"):
        return original(target_model, draft_model=draft_model)
    found = find_language_model(target_model)
    embed, head = getattr(found and found[1], "embed_tokens", None), getattr(target_model, "lm_head", None)
    if embed is None or head is None:
        return original(target_model, draft_model=draft_model)
    return embed.weight, head.weight


def _hand_out(stack: Any, plan: AssemblyPlan, states: dict[Boundary, torch.Tensor]) -> None:
    """Have a stack return the captured states beside its output, in capture order.

    The runners of SGLang's CUDA graphs call ``stack.forward`` itself, read its signature and replace it while they
    replay, so it is the attribute that is wrapped and not the call.
    """
    forward = stack.forward
    n = plan.target.num_layers

    @functools.wraps(forward)
    def forward_and_hand_out(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        hidden_states = forward(*args, **kwargs)
        forward_batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        if not len(hidden_states) or forward_batch.forward_mode.is_idle():
            # Without tokens some classes leave the final norm out and return boundary n itself.
            states.setdefault(n, hidden_states)
        states["final_norm"] = hidden_states
        wrong = [b for b in plan.capture if b not in states or states[b].shape != hidden_states.shape]
        if wrong:
            raise UnsupportedError(
                f"{plan.target.path}: captured states: got "
                + ", ".join(
                    f"{'none' if b not in states else tuple(states[b].shape)} for {assembly.spell(b, n)}" for b in wrong
                )
                + f"; expected states of {tuple(hidden_states.shape)}. {OTHER_ROWS}"
            )
        captured = [states[b] for b in plan.capture]
        states.clear()  # nothing may outlive the pass: a long prompt's states are as large as a model's layer
        return hidden_states, captured

    stack.forward = forward_and_hand_out
