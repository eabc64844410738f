"""Target classes with attention, MLP and experts of their own, on one rank; run by ``test_runtimes.py``.

SGLang's workers bring each up with a draft on the CPU platform. What is handed out is compared with transformers'
states of the same weights. The other classes are run with stand-ins in ``capture_targets.py`` alone, for the reasons of
``NOT_RUN``.
"""

from __future__ import annotations

import os

# Read when SGLang is imported, which is why these tests have a process of their own.
os.environ["SGLANG_PLATFORM"] = "eagle3_ext"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import workers

from tests.test_host import capture_targets as classes
from tests.test_host.tensor_parallel import KINDS, OF_SIX, Kind, furthest, run_pair, write_other, write_pair

pytestmark = pytest.mark.host

ROUTED = classes.ROUTED_EXPERTS | {"norm_topk_prob": True, "routed_scaling_factor": 1.5}
LATENT = classes.LATENT | ROUTED | {"head_dim": classes.LATENT["qk_rope_head_dim"]}
GREEDY = {"norm_topk_prob": False, "topk_method": "greedy", "scoring_func": "softmax"}
# SGLang fills up merged projections of other widths on a CPU, and not those that a file has merged or left alone.
WHOLE = {"intermediate_size": 64}


def write_apertus(folder: Path) -> Any:
    """Write a target whose activations' own numbers are in bfloat16, in which SGLang keeps them at every dtype."""
    model = write_other("Apertus", folder, **WHOLE)
    for layer in model.model.layers:
        layer.mlp.act_fn.bfloat16()
    model.save_pretrained(folder)
    return model


OWN: dict[str, Kind] = {
    f"{name}ForCausalLM": Kind(partial(write_other, name, **fields), **OF_SIX)
    for name, fields in {
        "Mistral": {},
        "Ministral3": {},
        "Qwen2": {},
        "Qwen3": {},
        "Phi3": WHOLE,
        "Glm4Moe": ROUTED,
        # transformers leaves the norms inside its latent attention at this epsilon whatever the file says.
        "Glm4MoeLite": LATENT | {"rms_norm_eps": 1e-6},
        "DeepseekV2": LATENT | GREEDY,
        "DeepseekV3": LATENT,
    }.items()
} | {"ApertusForCausalLM": Kind(write_apertus, **OF_SIX)}

ALONE = {
    "one state": Kind(partial(write_other, "Qwen3"), ("layer2",), (3,)),
    "the normed state alone": Kind(partial(write_other, "Qwen3"), ("final_norm",), ("final_norm",)),
}
"""Drafts with a single source: SGLang then hands on the state itself, not a concatenation."""

NOT_RUN: dict[str, str] = {
    **{name: f"the layers of `{other}`" for name, other in classes.SAME_LAYERS.items()},
    **{name: f"the layers of `{other}` but for the rotation" for name, other in classes.OTHER_ROTATION.items()},
    **dict.fromkeys(("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"), "sparse attention by an indexer"),
    **dict.fromkeys(
        (
            "Glm5NextForConditionalGeneration",
            "InternS2MobiusForConditionalGeneration",
            "InternS2PreviewForConditionalGeneration",
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        "gated delta networks",
    ),
    **dict.fromkeys(
        (
            "Gemma4ForCausalLM",
            "Gemma4ForConditionalGeneration",
            "Gemma4UnifiedForConditionalGeneration",
            "MellumForCausalLM",
        ),
        "windows",
    ),
    "GptOssForCausalLM": "windows and attention sinks",
    **dict.fromkeys(("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"), "SGLang asks for an attention backend of a GPU"),
    "MiniMaxM2ForCausalLM": "norms on Triton",
    "Qwen2MoeForCausalLM": "the gate of its shared expert on Triton",
    "LongcatFlashForCausalLM": "SGLang's configuration drops the rope of transformers' files",
    **dict.fromkeys(
        ("BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "SarvamMoEForCausalLM"),
        "no class in transformers to compare with",
    ),
    **dict.fromkeys(
        (
            "Llama4ForCausalLM",
            "Llama4ForConditionalGeneration",
            "MiniMaxM3SparseForCausalLM",
            "MiniMaxM3SparseForConditionalGeneration",
        ),
        "not tried",
    ),
}
"""Why a class's own attention and experts were not run: what the CPU platform has not, unless it says otherwise."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="session")
def models(folder: Path) -> dict[str, Any]:
    """Write every pair; return the targets as transformers has them."""
    return {name: write_pair(kind, folder / name) for name, kind in (OWN | ALONE).items()}


@pytest.fixture(scope="session")
def seen(folder: Path, models: dict[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Bring every pair up in a process of its own and collect what it saw."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # What every process needs, imported once.
    import sglang.srt.managers.tp_worker
    import sglang.srt.models.registry
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401

    work = {name: partial(run_pair, kind, folder / name) for name, kind in (OWN | ALONE).items()}
    return {name: found[1][0] for name, found in workers.on_ranks(work, folder / "seen", sizes=[1]).items()}


@pytest.fixture(scope="session")
def results() -> Iterator[dict[str, float]]:
    """Collect what was found; kept in the file that ``OWN_RESULTS`` names."""
    found: dict[str, float] = {}
    yield found
    if file := os.environ.get("OWN_RESULTS"):
        Path(file).write_text(json.dumps({"served": found, "not_run": NOT_RUN}, indent=1) + "\n")


def test_every_class_was_run_or_has_its_reason() -> None:
    serving = {case.architecture for case in classes.CASES if case.serves}
    assert not (set(OWN) | set(KINDS)) & set(NOT_RUN)
    assert set(OWN) | set(KINDS) | set(NOT_RUN) == serving


@pytest.mark.parametrize("name", [*OWN, *ALONE])
def test_states_are_those_of_each_text_alone(
    name: str, seen: Mapping[str, Mapping[str, Any]], models: dict[str, Any], results: dict[str, float]
) -> None:
    assert seen[name]["problems"] == ()
    kind = (OWN | ALONE)[name]
    count = len(kind.sources)
    assert seen[name]["proof"].startswith(f"{count} of {count} state(s) equal the residual stream")
    worst = furthest(kind, seen[name], models[name])
    if name in OWN:
        results[name] = worst
