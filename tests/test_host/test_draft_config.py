"""What SGLang's own ModelConfig makes of a draft, in a process of its own: length, quantisation, parser, class."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_draft

pytestmark = pytest.mark.host

READ = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.configs.model_config import ModelConfig

for line in sys.stdin:
    path, asked = json.loads(line)
    try:
        config = ModelConfig(path, is_draft_model=True, speculative_algorithm="EAGLE3", **asked)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    else:
        answer = {
            "context": config.context_len,
            "positions": config.hf_config.max_position_embeddings,
            "quantisation": config.quantization,
            "architectures": config.hf_config.architectures,
            "rope": getattr(config.hf_config, "rope_parameters", None),
        }
    print("answer " + json.dumps(answer))
"""


def read(cases: Mapping[str, tuple[Path, dict[str, Any]]], ext: str = "on") -> dict[str, dict[str, Any]]:
    """Let one process of SGLang read drafts as its draft worker does."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input="".join(json.dumps([str(path), asked]) + "\n" for path, asked in cases.values()),
        capture_output=True,
        text=True,
        env=env | {"EAGLE3_EXT": ext},
        timeout=300,
        check=False,
    )
    answers = [json.loads(line.removeprefix("answer ")) for line in done.stdout.splitlines() if line[:7] == "answer "]
    assert len(answers) == len(cases), done.stderr[-3000:]
    return dict(zip(cases, answers, strict=True))


YARN = {"rope_type": "yarn", "factor": 4.0}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    root = tmp_path_factory.mktemp("drafts")

    def draft(name: str, **changes: Any) -> Path:
        return write_draft(root / name, config_changes={"max_position_embeddings": 128, **changes})

    beside = draft("beside")
    (beside / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}})
    )
    return {
        "fits": (draft("fits"), {"context_length": 100}),
        "longer": (draft("longer"), {"context_length": 4096}),
        "yarn": (draft("yarn", rope_scaling=YARN), {"context_length": 4096}),
        "yarn within its stretch": (draft("stretch", rope_scaling=YARN), {"context_length": 300}),
        "dynamic": (draft("dynamic", rope_scaling={"type": "dynamic", "factor": 4.0}), {"context_length": 300}),
        "key": (draft("key", quantization_config=FP8), {}),
        "file": (beside, {}),
        "reads a checkpoint": (draft("awq"), {"quantization": "awq"}),
        "while loading": (draft("fp8"), {"quantization": "fp8"}),
        "Mistral in the path": (
            draft("Mistral-EAGLE3", architectures=["LlamaEagle3DraftModel"], eagle3_ext={"producer": "specforge"}),
            {},
        ),
    }


def test_a_draft_that_brings_what_breaks_it_just_starts(cases: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    ours, stock = read(cases), read(cases, ext="off")

    assert ours["fits"] == stock["fits"] | {"architectures": ours["fits"]["architectures"]}
    assert ours["fits"]["context"] == 100
    assert ours["fits"]["positions"] == 128

    # Stock says no to a draft that is shorter than its target.
    assert "context_length (4096)" in stock["longer"]["error"]
    assert (ours["longer"]["context"], ours["longer"]["positions"]) == (4096, 4096)
    # Where the scaling falls back on the draft's own length, that length is kept.
    assert (ours["yarn"]["context"], ours["yarn"]["positions"]) == (4096, 4096)
    assert ours["yarn"]["rope"]["original_max_position_embeddings"] == 128
    # Neither does the factor of these give a draft more positions than it says.
    for name in ("yarn within its stretch", "dynamic"):
        assert (ours[name]["context"], ours[name]["positions"]) == (300, 300)

    # A plain draft keeps its plain layers, whatever was copied from the target.
    assert (stock["key"]["quantisation"], ours["key"]["quantisation"]) == ("fp8", None)
    assert (stock["file"]["quantisation"], ours["file"]["quantisation"]) == ("modelopt_fp8", None)
    assert ours["reads a checkpoint"].get("quantisation", "absent") is None
    # What can be done to plain weights is done as stock does it.
    assert ours["while loading"]["quantisation"] == stock["while loading"]["quantisation"] == "fp8"

    assert ours["Mistral in the path"]["architectures"] == ["LlamaForCausalLMEagle3"]
