"""Tests inside SGLang's own runtime, each file in a process of its own.

SGLang keeps its platform, its parallel groups and its settings in the process. The files named here bring one up
on the CPU platform; no other run collects them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.host

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("file", "switches"),
    [
        pytest.param("draft_model", {}, id="drafts are served as the reference computes them"),
        pytest.param("mla_draft_model", {}, id="so are drafts with latent attention"),
        pytest.param(
            "exported_mla",
            {"SGLANG_PLATFORM": "eagle3_ext"},
            id="and, exported for stock, they are computed by its own class",
        ),
        pytest.param("capture_targets", {}, id="every target class hands out the states asked for"),
        pytest.param("target_proof", {}, id="captured states are proved before the server is ready"),
        pytest.param("own_layers", {}, id="so they are by classes with layers of their own", marks=pytest.mark.soak),
        pytest.param("tensor_parallel", {}, id="two ranks compute, capture and prove what one does"),
        pytest.param("features_under_load", {}, id="under load the draft is fed what a plain run has"),
        pytest.param("triton_verify", {}, id="drafts are verified inside SGLang's Triton backend"),
        pytest.param("triton_verify", {"VERIFY_TARGET": "latent"}, id="so are a latent target's"),
        pytest.param("latent_target", {"LATENT_TARGET_ROPE": "default"}, id="a latent target is transformers' own"),
        pytest.param("latent_target", {"LATENT_TARGET_ROPE": "yarn"}, id="and under yarn"),
    ],
)
def test_in_a_process_of_its_own(file: str, switches: dict[str, str]) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_EXT", "SGLANG_"))}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, str(HERE / f"{file}.py")],
        env=environment | switches,
        capture_output=True,
        text=True,
        timeout=900,
        cwd=HERE.parents[1],
        check=False,
    )
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
