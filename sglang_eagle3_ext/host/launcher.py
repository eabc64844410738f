"""Checks in the launcher process, before a worker starts and before any weight loads."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sglang_eagle3_ext import assembly, formats
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.host import config
from sglang_eagle3_ext.host.exit import report_without_traceback
from sglang_eagle3_ext.host.switches import STOCK_INSTEAD
from sglang_eagle3_ext.spec import DraftSpec, Finding

logger = logging.getLogger(__name__)

_OTHER_ALGORITHMS = ("EAGLE", "NEXTN", "STANDALONE")

LATENT_ONLY_BACKENDS = frozenset(
    {"compressed", "cutedsl_mla", "dsa", "dsv4", "flashmla", "nsa", "tokenspeed_mla", "trtllm_mla"}
)
"""SGLang's attention backends that serve latent attention (or DeepSeek's sparse one) and nothing else."""

_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")

_MANY_VALUES = 500_000_000
"""Values of a draft above which it is said that they are read: they take a second or more."""

GROUPED_BACKEND = "triton"
"""The backend that a draft with grouped attention gets beside a target on one of them."""


def check_draft(server_args: Any) -> None:
    """Check that the draft can be read and fits the algorithm (BEFORE ``handle_speculative_decoding``).

    Stock would meet a missing folder, or an algorithm that the platform lacks, first, and say less about it.

    Raises:
        CheckpointError: the draft cannot be read, or not be served by this algorithm. On SGLang's own command
            line the process ends with these lines and exit code 1.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view

    args = resolving_view(server_args)
    algorithm, draft = (args.speculative_algorithm or "").upper(), args.speculative_draft_model_path
    if draft is None or algorithm not in ("EAGLE3", *_OTHER_ALGORITHMS):
        return
    with _without_traceback():
        override, revision = _override(args), args.speculative_draft_model_revision
        if algorithm == "EAGLE3":
            try:
                config.read_spec(draft, revision, override)
            except CheckpointError as error:
                if error.spec is None:
                    raise
                raise CheckpointError.from_findings([*error.findings, *_values(error.spec)]) from None
        # A target's own MTP layers are served out of the target's checkpoint.
        elif draft != args.model_path and _is_eagle3_draft(draft, revision, override):
            raise CheckpointError(
                f"--speculative-algorithm: got {algorithm} for {draft}, which is an EAGLE-3 draft; expected "
                "EAGLE3, because every other algorithm feeds it one hidden state and skips its fc. "
                "Serve it with --speculative-algorithm EAGLE3."
            )


def check_launch(_result: Any, server_args: Any) -> None:
    """Check draft, target and flags together (AFTER ``handle_speculative_decoding``).

    Raises:
        CheckpointError: the draft cannot be served like this; holds every problem. On SGLang's own command
            line the process ends with these lines and exit code 1.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view

    args = resolving_view(server_args)
    if (args.speculative_algorithm or "").upper() != "EAGLE3":
        return
    with _without_traceback():
        draft = args.speculative_draft_model_path
        if draft is None:
            raise CheckpointError(
                "--speculative-draft-model-path: got none; expected the folder or Hub id of an EAGLE-3 draft. "
                "Name the draft, or serve without --speculative-algorithm EAGLE3."
            )
        spec = config.read_spec(draft, args.speculative_draft_model_revision, _override(args))
        if spec is None:
            return
        _note_ropes_of_the_target(args)
        plan = assembly.plan(spec, config.target_facts(model_config_of(args)))
        findings = [*plan.findings, *_values(spec)]
        findings += flag_findings(args, server_args.speculative_num_draft_tokens, spec)
        if any(f.severity == "error" for f in findings):
            raise CheckpointError.from_findings(findings)
    _settle_draft_backend(server_args, args, spec)


def _note_ropes_of_the_target(args: Any) -> None:
    """Say that a rope on the command line, which SGLang hands to both models, is not the draft's."""
    keys = [key for key in _ROPE_KEYS if key in _given(args)]
    if keys:
        logger.warning(
            "sglang-eagle3: --json-model-override-args: got %s, which is the target's alone; expected the draft's "
            "rotation in eagle3_ext, and kept the one it was trained with. To give it another, set "
            "eagle3_ext.rope_scaling or eagle3_ext.rope_theta.",
            ", ".join(keys),
        )


def _values(spec: DraftSpec) -> tuple[Finding, ...]:
    """Look at the draft's values, which a worker would have placed in part before it met a bad one."""
    count = sum(math.prod(info.shape) for info in spec.tensors.values())
    if count > _MANY_VALUES:
        logger.info("%s: reading its %.1f billion values once, to see that all are numbers", spec.path, count / 1e9)
    return formats.check_values(spec)


@contextmanager
def _without_traceback() -> Iterator[None]:
    """End SGLang's own command line with the lines of a CheckpointError alone."""
    try:
        yield
    except CheckpointError:
        report_without_traceback()
        raise


def _override(args: Any) -> Mapping[str, Any] | None:
    return config.ext_override(_given(args))


def _given(args: Any) -> dict[str, Any]:
    """Read ``--json-model-override-args``."""
    text = args.json_model_override_args or "{}"
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"--json-model-override-args: got {error}; expected a JSON object. Check the quotes."
        ) from error
    if not isinstance(given, dict):
        raise CheckpointError(f"--json-model-override-args: got {text}; expected a JSON object. Write one.")
    return given


def flag_findings(args: Any, asked_tokens: int | None, spec: DraftSpec) -> Iterator[Finding]:
    """Report flags with which SGLang serves the draft otherwise than asked for, or not at all.

    Args:
        args: the flags as resolved so far.
        asked_tokens: ``--speculative-num-draft-tokens`` as given.
        spec: the draft.
    """
    if args.pp_size > 1 and spec.num_sources:
        yield Finding(
            "error",
            "pipeline_parallel",
            f"--pipeline-parallel-size: got {args.pp_size}; expected 1, because stages before the last one never "
            "hand their hidden states to the draft. Use tensor parallelism.",
        )
    if args.enable_two_batch_overlap and spec.num_sources:
        yield Finding(
            "error",
            "two_batch_overlap",
            "--enable-two-batch-overlap: got it with an EAGLE-3 draft; expected it to be off, because SGLang's "
            "overlapped path captures no hidden states. Drop the flag.",
        )
    if args.attn_dp_size > 1:
        yield Finding(
            "error",
            "attention_data_parallel",
            f"--attn-dp-size: got {args.attn_dp_size}; expected 1, because ranks then pad, gather and idle for each "
            "other, and nothing has shown yet that captured states keep to the rows of their own requests. Use tensor "
            f"parallelism, or {STOCK_INSTEAD}.",
        )
    if (args.attn_cp_size > 1 or args.enable_prefill_cp) and spec.num_sources:
        got = f"--attn-cp-size {args.attn_cp_size}" if args.attn_cp_size > 1 else "--enable-prefill-cp"
        yield Finding(
            "error",
            "context_parallel",
            f"{got}: got it with an EAGLE-3 draft; expected no context parallelism, because ranks then hold parts of "
            "one prompt's rows, and nothing has shown yet that captured states come together in the order of the "
            f"prompt. Use tensor parallelism, or {STOCK_INSTEAD}.",
        )
    if args.enable_pdmux and spec.num_sources:
        yield Finding(
            "error",
            "prefill_multiplexing",
            "--enable-pdmux: got it with an EAGLE-3 draft; expected it to be off, because a prefill that is split "
            "between layers hands no hidden states to the draft. Drop the flag.",
        )
    if args.enable_multi_layer_eagle:
        yield Finding(
            "error",
            "multi_layer_eagle",
            "--enable-multi-layer-eagle: got it with an EAGLE-3 draft; expected it to be off, because SGLang then "
            "drafts with one model per step, which an EAGLE-3 draft does not have. Drop the flag.",
        )
    method = args.speculative_draft_model_quantization
    # What SGLang took over from --quantization is settled where the draft's config is read.
    is_own = method is not None and args._speculative_draft_quantization_explicitly_set
    if is_own and config.needs_quantised_checkpoint(method):
        yield Finding(
            "error",
            "draft_quantization",
            f"--speculative-draft-model-quantization: got {method}, which reads a quantised checkpoint; expected "
            f"unquant or a method that quantises while it loads, since {spec.path} is stored unquantised. Pass one.",
        )
    steps, topk, tokens = (
        args.speculative_num_steps,
        args.speculative_eagle_topk,
        args.speculative_num_draft_tokens,
    )
    if topk == 1 and asked_tokens is not None and asked_tokens != tokens:
        message = (
            f"--speculative-num-draft-tokens: got {asked_tokens} with --speculative-num-steps {steps} and "
            f"--speculative-eagle-topk 1; expected {tokens}, since a chain has steps + 1 tokens. SGLang serves with "
            f"steps {steps}, topk 1, draft tokens {tokens}; give {tokens}, or other steps."
        )
        yield Finding("error" if spec.strict else "warning", "draft_tokens_adjusted", message)
        if not spec.strict:
            logger.warning("sglang-eagle3: %s", message)


def _settle_draft_backend(server_args: Any, args: Any, spec: DraftSpec) -> None:
    """Give the draft a backend of its own where it would inherit one that cannot compute its attention."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    if spec.attention.kind == "mla" or args.speculative_draft_attention_backend is not None:
        return
    named = (args.decode_attention_backend, args.prefill_attention_backend, args.attention_backend)
    latent = next((name for name in named if name in LATENT_ONLY_BACKENDS), None)
    if latent is None:
        return
    logger.warning(
        "sglang-eagle3: --attention-backend: got %s for the target, which cannot compute the draft's grouped "
        "attention; expected a backend of the draft's own, and took %s. Name another with "
        "--speculative-draft-attention-backend.",
        latent,
        GROUPED_BACKEND,
    )
    declare_resolution(server_args, "sglang-eagle3-ext", speculative_draft_attention_backend=GROUPED_BACKEND)


def _is_eagle3_draft(draft: str, revision: str | None, override: Mapping[str, Any] | None) -> bool:
    """Say whether a checkpoint is an EAGLE-3 draft; one that cannot be read is stock's business here."""
    try:
        return config.read_spec(draft, revision, override) is not None
    except CheckpointError:
        return "eagle3_ext" in config.peek(draft, revision)
