"""What happens once per server: our classes enter the model registry, and the log says what is served."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from sglang_eagle3_ext import assembly
from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host import config, proof
from sglang_eagle3_ext.host.switches import read_switches
from sglang_eagle3_ext.spec import AssemblyPlan

logger = logging.getLogger(__name__)

_registered = False


def register_models(model_config: Any) -> None:
    """Put our draft classes into SGLang's registry (BEFORE a model class is resolved), once a draft asks for one."""
    global _registered
    if _registered or getattr(model_config.hf_config, config.DRAFT_KEY, None) is None:
        return
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.register("sglang_eagle3_ext.host.models", overwrite=True, strict=True)
    _registered = True


def register_backend(*, model_runner: Any) -> None:
    """Put our maker of the backend ``triton`` before SGLang's (BEFORE backends are made), once a target asks for it.

    Args:
        model_runner: SGLang's runner, its weights loaded.
    """
    if not (read_switches().kernels and model_runner.spec_algorithm.is_eagle3()):
        return
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_eagle3_ext.host import verify

    stock = ATTENTION_BACKENDS[verify.BACKEND]
    if getattr(stock, "func", None) is not verify.make_backend:
        ATTENTION_BACKENDS[verify.BACKEND] = partial(verify.make_backend, stock)


def report(_result: Any, draft_worker: Any) -> None:
    """Prove the capture on every rank, log the start-up block on the first (AFTER the draft's backends are made).

    The target's weights, pool and attention backends are in place by then, and no CUDA graph is captured yet.

    Raises:
        UnsupportedError: the target does not hand out the states of the plan.
    """
    from sglang.srt.runtime_context import get_parallel

    runner = draft_worker.draft_runner
    plan = getattr(runner.model, "plan", None)
    if not isinstance(plan, AssemblyPlan):
        return
    try:
        found = proof.prove(draft_worker, plan)
    except UnsupportedError as error:  # the other ranks wait for this one's verdict
        found = proof.failed(str(error))
    verdict = proof.of_all_ranks(found)
    if get_parallel().tp_rank == 0:
        from sglang_eagle3_ext.host import verify

        for line in block(plan, runner, verdict):
            logger.info("%s", line)
        logger.info("  %-17s %s", "verify", verify.describe(draft_worker.target_worker.model_runner))
    verdict.check()


def block(plan: AssemblyPlan, runner: Any, verdict: proof.Verdict) -> list[str]:
    """Spell the resolved assembly and how it is served, one line each.

    Args:
        plan: the plan.
        runner: SGLang's model runner of the draft.
        verdict: what the proof of captured states found.
    """
    spec, n = plan.spec, plan.target.num_layers
    origin = plan.origins

    def line(title: str, text: str, *fields: str) -> str:
        came = sorted({origin[f] for f in fields if f in origin})
        return f"  {title:<17} {text}" + (f"   (from {', '.join(came)})" if came else "")

    spelled = " | ".join(assembly.spell(b, n) for b in plan.boundaries)
    window = spec.attention.sliding_window
    lines = [
        f"EAGLE-3 draft {spec.path} ({spec.format}) on {plan.target.path} ({plan.target.architecture}, {n} layers)",
        line("assembly", f"fc <- [{spelled}]" if spec.fc_in else f"{spelled}, without fc", "sources"),
        line("boundaries", f"{list(plan.boundaries)}, order {spec.order}", "order", "layer_ids"),
        *(line(label, text) for label, text in assembly.spell_ids(plan)),
        line("proof", verdict.text),
        line("norms around fc", spec.norms.around_fc, "norms"),
        line("residual", spec.norms.residual, "residual"),
        line("recurrent state", spec.norms.recurrent_state, "recurrent_state"),
        line("vocabulary map", f"{spec.vocab.map}, {spec.vocab.draft} of {spec.vocab.target}", "vocab_map"),
        line("embedding", runner.model.embed_origin, "embed"),
        line("head", spec.lm_head, "lm_head"),
        line(
            "attention",
            f"{spec.attention.kind}, {spec.attention.num_layers} layer(s), {spec.attention.heads} heads, "
            f"{spec.attention.kv_heads} kv heads"
            + (f", window {window}" if window else "")
            + f"; backend {type(runner.attn_backend).__name__}",
        ),
        *_positions(plan),
        line("quantisation", str(runner.model_config.quantization or "none") + f", {runner.dtype}"),
        line("kernels", runner.model.model.computed_by),
    ]
    lines += [f"  unlike stock      {text}" for text in plan.differences]
    lines += [f"  {f.severity:<17} {f.message}" for f in plan.findings if f.severity != "info"]
    return lines


def _positions(plan: AssemblyPlan) -> list[str]:
    """Say where the draft goes on beyond its own length."""
    return [f"  {'positions':<17} {f.message}" for f in plan.findings if f.code == "short_context"]
