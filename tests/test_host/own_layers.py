"""Target classes with attention, MLP and experts of their own, on one rank; run by ``test_runtimes.py``.

SGLang's workers bring each up with a draft on the CPU platform. What is handed out is compared with transformers'
states of the same weights. The other classes are run with stand-ins in ``capture_targets.py`` alone: this platform has
no windows, sinks, gated delta networks or Triton's experts, or transformers computes something else there.
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
from tests.test_host.tensor_parallel import OF_SIX, Kind, furthest, run_pair, write_other, write_pair

pytestmark = pytest.mark.host

ROUTED = classes.ROUTED_EXPERTS | {"norm_topk_prob": True, "routed_scaling_factor": 1.5}
LATENT = classes.LATENT | ROUTED | {"head_dim": classes.LATENT["qk_rope_head_dim"]}

OWN: dict[str, Kind] = {
    f"{name}ForCausalLM": Kind(partial(write_other, name, **fields), **OF_SIX)
    for name, fields in {
        "Mistral": {},
        "Ministral3": {},
        "Qwen2": {},
        "Qwen3": {},
        "Glm4Moe": ROUTED,
        "DeepseekV3": LATENT,
    }.items()
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="session")
def models(folder: Path) -> dict[str, Any]:
    """Write every pair; return the targets as transformers has them."""
    return {name: write_pair(kind, folder / name) for name, kind in OWN.items()}


@pytest.fixture(scope="session")
def seen(folder: Path, models: dict[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Bring every pair up in a process of its own and collect what it saw."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # What every process needs, imported once.
    import sglang.srt.managers.tp_worker
    import sglang.srt.models.registry
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401

    work = {name: partial(run_pair, kind, folder / name) for name, kind in OWN.items()}
    return {name: found[1][0] for name, found in workers.on_ranks(work, folder / "seen", sizes=[1]).items()}


@pytest.fixture(scope="session")
def results() -> Iterator[dict[str, float]]:
    """Collect what was found; kept in the file that ``OWN_RESULTS`` names."""
    found: dict[str, float] = {}
    yield found
    if file := os.environ.get("OWN_RESULTS"):
        Path(file).write_text(json.dumps({"served": found}, indent=1) + "\n")


@pytest.mark.parametrize("name", OWN)
def test_states_are_those_of_each_text_alone(
    name: str, seen: Mapping[str, Mapping[str, Any]], models: dict[str, Any], results: dict[str, float]
) -> None:
    assert seen[name]["problems"] == ()
    assert seen[name]["proof"].startswith("4 of 4 state(s) equal the residual stream")
    results[name] = furthest(OWN[name], seen[name], models[name])
