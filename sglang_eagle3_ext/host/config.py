"""From SGLang's configs to our plan: which draft is ours, what SGLang must believe about it, what is captured."""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from sglang_eagle3_ext import assembly, formats
from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.formats import folder
from sglang_eagle3_ext.host import contract
from sglang_eagle3_ext.host.exit import report_without_traceback
from sglang_eagle3_ext.spec import AssemblyPlan, DraftSpec, TargetFacts

logger = logging.getLogger(__name__)

DRAFT_KEY = "eagle3_ext_draft"
"""Attribute of a draft's hf_config that says the draft is served by this package (JSON text, see draft_key)."""

ARCHITECTURE = "LlamaForCausalLMEagle3"
MLA_ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"


def draft_key(path: str, revision: str | None, override: Mapping[str, Any] | None) -> str:
    """Spell the identity of a draft as text, so that it can travel in an hf_config.

    A folder that was changed on disk is another draft, also within one process.
    """
    root = Path(path)
    try:
        changed = sorted((f.name, f.stat().st_mtime_ns) for f in root.iterdir() if f.is_file()) if root.is_dir() else []
    except OSError:  # reading it will say why
        changed = []
    return json.dumps([path, revision, dict(override or {}), changed], sort_keys=True)


def peek(path: str, revision: str | None) -> Mapping[str, Any]:
    """Read a checkpoint's ``config.json`` as it stands; empty when there is none to read."""
    try:
        return folder.read_json(folder.locate(path, revision, weights=False) / "config.json", "config_unreadable")
    except CheckpointError:
        return {}


@lru_cache(maxsize=8)
def _read(key: str) -> DraftSpec:
    path, revision, override, _ = json.loads(key)
    return formats.read_draft(path, override=override or None, revision=revision)


def read_spec(path: str, revision: str | None, override: Mapping[str, Any] | None) -> DraftSpec | None:
    """Read a draft, or return ``None`` when it is served by a draft class of SGLang's that is none of EAGLE-3's.

    Raises:
        CheckpointError: the checkpoint is an EAGLE-3 draft and broken, or nothing that SGLang has a draft class for.
    """
    try:
        spec = _read(draft_key(path, revision, override))
    except CheckpointError as error:
        unclaimed = any(f.code == "dialect_unknown" for f in error.findings)
        if unclaimed and not override and _has_another_draft_class(peek(path, revision)):
            return None
        raise
    problems = _contract_problems()
    if problems:
        from sglang_eagle3_ext.host import guard

        guard.refuse(" ".join(problems))
        if override or spec.has_eagle3_ext:
            raise CheckpointError(
                f"{path}: declares its assembly in eagle3_ext, which stock SGLang does not read; expected "
                f"sglang-eagle3-ext to fit this SGLang. {' '.join(problems)} Run: sglang-eagle3 doctor"
            )
        return None
    return spec


def _has_another_draft_class(config: Mapping[str, Any]) -> bool:
    """Say whether SGLang, or another plugin of it, has a draft class for a checkpoint that no reader of ours claims."""
    names = config.get("architectures")
    if "eagle3_ext" in config or not isinstance(names, list):
        return False
    drafts = [n for n in names if isinstance(n, str) and "eagle" in n.lower() and n not in formats.ARCHITECTURES]
    if not drafts:
        return False
    from sglang.srt.models.registry import ModelRegistry

    return any(ModelRegistry.is_arch_supported(name) for name in drafts)


def _contract_problems() -> tuple[str, ...]:
    """Check the contract before anything is done for a draft: no hook may act where a later one cannot.

    It imports every model of SGLang's, which its workers have and its launcher has not: seconds. Of the release that
    the contract was written for, the workers check it.
    """
    from sglang_eagle3_ext.host import plugin, seams

    replaced = tuple(seams.problems({hook.seam for hook in plugin.all_hooks()}))
    is_launcher = multiprocessing.parent_process() is None and "sglang.srt.models.registry" not in sys.modules
    if is_launcher and contract.installed_version() == contract.REFERENCE_VERSION:
        return replaced
    return (*replaced, *_checked_contract_problems())


@cache
def _checked_contract_problems() -> tuple[str, ...]:
    return tuple(contract.problems("start", "models"))


def ext_override(model_override_args: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``eagle3_ext`` object of ``--json-model-override-args``.

    Raises:
        CheckpointError: it is not an object.
    """
    override = model_override_args.get("eagle3_ext")
    if override is not None and not isinstance(override, Mapping):
        raise CheckpointError(
            f"--json-model-override-args:eagle3_ext: got {override!r}; expected an object. "
            'Write it like {"eagle3_ext": {"sources": ["embed", "layer3", "layer31"]}}.'
        )
    return override


def draft_hf_fields(spec: DraftSpec) -> dict[str, Any]:
    """Spell a draft as the hf_config fields that SGLang sizes buffers, KV pools and logits from."""
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURE if spec.attention.latent is None else MLA_ARCHITECTURE],
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.attention.num_layers,
        "num_attention_heads": spec.attention.heads,
        "num_key_value_heads": spec.attention.kv_heads,
        "vocab_size": spec.vocab.target,
        "draft_vocab_size": None if spec.lm_head == "target" else spec.vocab.draft,
        "tie_word_embeddings": spec.lm_head == "tied",
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_act": spec.hidden_act,
        # Stock's attention gives o_proj a bias when either is set; all other biases are the model class's business.
        "attention_bias": spec.attention.o_bias,
        "bias": spec.attention.o_bias,
        "eagle_config": {"use_aux_hidden_state": spec.num_sources > 0},
    }
    if spec.attention.latent is None:
        fields["head_dim"] = spec.attention.head_dim
    else:
        # The model class lays halves out as neighbours, which SGLang rotates on every device.
        fields |= {**asdict(spec.attention.latent), "rope_interleave": True}
    if spec.num_sources:
        fields["num_aux_hidden_states"] = spec.num_sources
        fields["target_hidden_size"] = spec.target_hidden_size
    if spec.max_position_embeddings:
        fields["max_position_embeddings"] = spec.max_position_embeddings
    if spec.rope.partial_rotary_factor != 1.0:
        fields["partial_rotary_factor"] = spec.rope.partial_rotary_factor
    return fields


def rope_parameters(spec: DraftSpec) -> dict[str, Any]:
    """Spell the draft's rope in the one form that stock's attention reads without guessing."""
    return {"rope_type": "default", **(spec.rope.scaling or {}), "rope_theta": spec.rope.theta}


def normalise_draft_config(_result: Any, model_config: Any) -> None:
    """Give SGLang the draft's real shape (AFTER ``ModelConfig._config_draft_model``).

    Only drafts of ours are touched, and a key the user overrides on the command line keeps his value; not so the rope,
    which the model class builds from the spec.
    """
    if not model_config.is_draft_model or (model_config.speculative_algorithm or "").upper() != "EAGLE3":
        return
    override = ext_override(model_config.model_override_args)
    path, revision = model_config.model_path, model_config.revision
    spec = read_spec(path, revision, override)
    hf_config = model_config.hf_config
    if spec is None:
        logger.warning(
            "%s: got architectures %s; expected an EAGLE-3 draft, and left it to the class that SGLang has for it. "
            "Look at it with sglang-eagle3 inspect.",
            path,
            getattr(hf_config, "architectures", None),
        )
        return
    fields = draft_hf_fields(spec)
    # What SGLang finds in the config itself stays as it is written there; of latent attention it scales by it.
    if (
        spec.attention.latent is not None
        or spec.origins["rope_theta"] != "config"
        or spec.origins["rope_scaling"] not in ("config", "default")
    ):
        fields["rope_parameters"] = rope_parameters(spec)
    for name, value in fields.items():
        if name not in model_config.model_override_args and getattr(hf_config, name, _ABSENT) != value:
            setattr(hf_config, name, value)
    for name in _TARGETS_QUANTISATION:
        if name not in model_config.model_override_args and hasattr(hf_config, name):
            delattr(hf_config, name)
    setattr(hf_config, DRAFT_KEY, draft_key(path, revision, override))


_ABSENT = object()
_TARGETS_QUANTISATION = ("quantization_config", "compression_config")
"""Keys that a draft's config has from its target: a draft of ours is stored unquantised, or was refused."""


def _spec_of(model_config: Any) -> DraftSpec | None:
    """Return the draft that a config of SGLang's stands for; ``None`` for every model that is not ours."""
    key = getattr(model_config.hf_config, DRAFT_KEY, None)
    return None if key is None else _read(key)


def read_no_quantisation(original: Any, model_config: Any) -> Any:
    """Keep a target's ``hf_quant_config.json`` away from a plain draft (AROUND ``_parse_quant_hf_config``)."""
    return original(model_config) if _spec_of(model_config) is None else None


def inherit_no_quantisation(model_config: Any) -> None:
    """Drop a ``--quantization`` that was meant for the target (BEFORE ``_verify_quantization``).

    SGLang hands the target's to the draft. A method that quantises while it loads serves a plain draft, too; one
    that reads a quantised checkpoint stops at it.
    """
    method = model_config.quantization
    if method is None or model_config.is_draft_quantization_explicit or _spec_of(model_config) is None:
        return
    if needs_quantised_checkpoint(method):
        logger.info(
            "%s: stored unquantised and served so; --quantization %s, which needs a quantised checkpoint, is the "
            "target's alone.",
            model_config.model_path,
            method,
        )
        model_config.quantization = None


def needs_quantised_checkpoint(method: str) -> bool:
    """Say whether a quantisation method of SGLang's stops at plain weights."""
    from sglang.srt.layers.quantization import get_quantization_config

    # SGLang itself quantises plain weights with the methods that have no file of their own, and with this one.
    return bool(get_quantization_config(method).get_config_filenames()) and method != "modelopt_fp4"


def extend_positions(model_config: Any, context_length: int | None) -> None:
    """Let the draft follow the target to its last position (BEFORE ``_derive_context_length``).

    Stock stops where the target's context is longer than the draft's. A rotation goes on by itself; scalings that
    fall back on the draft's own length keep it.
    """
    spec = _spec_of(model_config)
    if spec is None or context_length is None or not 0 < assembly.positions(spec) < context_length:
        return
    config = model_config.hf_text_config
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") in _STRETCHED_FROM_LENGTH:
        rope.setdefault("original_max_position_embeddings", spec.max_position_embeddings)
    config.max_position_embeddings = context_length


_STRETCHED_FROM_LENGTH = ("yarn", "deepseek_yarn", "longrope")
"""Scalings that take ``max_position_embeddings`` for the trained length where nothing else gives it."""


def parse_draft_config(original: Any, parser: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Parse a draft config that transformers cannot read, or reads wrong (AROUND the config parsers' ``parse``).

    speculators nests the layer's shape in ``transformer_layer_config`` and has no ``model_type``. Every other
    config is the original parser's.

    Raises:
        CheckpointError: it is a speculators config, and this draft cannot be read.
    """
    revision = kwargs.get("revision")
    try:
        config = original(parser, model, *args, **kwargs)
    except (OSError, ValueError, KeyError):
        if "speculators_model_type" not in peek(str(model), revision):
            raise
    else:
        if not hasattr(config, "speculators_model_type"):
            return config
    from transformers import LlamaConfig

    try:
        spec = formats.read_draft(str(model), revision=revision)
    except CheckpointError:
        report_without_traceback()
        raise
    hf_config = LlamaConfig(**draft_hf_fields(spec), rope_parameters=rope_parameters(spec))
    if spec.dtype:
        hf_config.dtype = spec.dtype
    hf_config._name_or_path = str(model)
    return hf_config


def parse_mistral_config(original: Any, parser: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Parse a draft whose path makes SGLang look for Mistral's own ``params.json`` (AROUND that parser's ``parse``)."""
    config = peek(str(model), kwargs.get("revision"))
    names = config.get("architectures")
    ours = isinstance(names, list) and any(isinstance(n, str) and n in formats.ARCHITECTURES for n in names)
    if ours or {"speculators_model_type", "eagle3_ext"} & set(config):
        from sglang.srt.configs.model_config_parser_registry import get_model_config_parser

        return get_model_config_parser("hf").parse(model, *args, **kwargs)
    return original(parser, model, *args, **kwargs)


# ---- the plan of this process -----------------------------------------------------------------------------

_plans: dict[str, AssemblyPlan] = {}


def target_facts(model_config: Any) -> TargetFacts:
    """Describe SGLang's target to the plan."""
    architecture = (model_config.hf_config.architectures or ["?"])[0]
    text = model_config.hf_text_config
    return TargetFacts(
        path=model_config.model_path,
        architecture=architecture,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        reading=assembly.stock_reading(architecture),
        context=model_config.context_len,
    )


def resolve_plan(
    result: Any, *, server_args: Any, model_config: Any, spec_algorithm: Any, is_draft_worker: bool
) -> None:
    """Resolve the plan once both configs are in hand (AFTER ``resolve_spec_aux_hidden_state_config``).

    Raises:
        CheckpointError: draft and target do not fit; holds every problem. No weight is loaded yet.
    """
    del server_args
    if is_draft_worker or not spec_algorithm.is_eagle3() or result.draft_model_config is None:
        return
    key = getattr(result.draft_model_config.hf_config, DRAFT_KEY, None)
    if key is None:
        return
    plan = assembly.plan(_read(key), target_facts(model_config))
    assembly.check(plan)
    _plans[key] = plan
    result.eagle_use_aux_hidden_state = plan.spec.num_sources > 0
    # SGLang carries this field untouched to configure_aux_hidden_state_capture, where host.capture takes it.
    result.eagle_aux_hidden_state_layer_ids = plan if plan.spec.num_sources else None


def plan_of(key: str) -> AssemblyPlan | None:
    """Return the plan that was resolved under this key in this process."""
    return _plans.get(key)
