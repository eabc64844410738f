"""The demo pair, its variants, and each server's answers, made once for all end-to-end tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recorder import Recorder, variant
from servers import OURS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _no_switches_of_the_caller() -> None:
    """Keep the caller's own switches out of every server."""
    for name in [n for n in os.environ if n.startswith(("EAGLE3_EXT", "SGLANG_"))]:
        del os.environ[name]


@pytest.fixture(scope="session")
def target() -> Path:
    """The demo target, dequantised on first use."""
    folder = ROOT / ".demo" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        subprocess.run([sys.executable, "-m", "benchmarks.demo.target"], check=True, cwd=ROOT)
    return folder


@pytest.fixture(scope="session")
def draft() -> Path:
    """The demo draft as committed: it declares its sources, stock reads nothing of them."""
    return ROOT / "benchmarks" / "demo" / "draft"


@pytest.fixture(scope="session")
def permuted_draft(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo draft re-saved with its blocks as [layer15, embed, layer3], declared so."""
    return variant(
        draft,
        tmp_path_factory.mktemp("drafts") / "permuted",
        {"eagle3_ext": {"sources": ["layer15", "embed", "layer3"]}},
        order=(2, 0, 1),
    )


@pytest.fixture(scope="session")
def stock_draft(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo draft with the id list that stock reads right, and nothing of ours."""
    ids = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [-1, 3, 15]}
    return variant(draft, tmp_path_factory.mktemp("drafts") / "stock", {"eagle3_ext": None, "eagle_config": ids})


@pytest.fixture(scope="session")
def exported_draft(permuted_draft: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``export`` writes for stock of the draft in another order, which stock could not serve."""
    folder = tmp_path_factory.mktemp("drafts") / "exported"
    command = [
        *OURS[:1],
        "export",
        str(permuted_draft),
        "--for",
        "stock",
        "--target",
        str(target),
        "--out",
        str(folder),
    ]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="session")
def prompts(target: Path) -> list[list[int]]:
    """Token ids of 24 questions in the target's own chat format."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    groups = json.loads((ROOT / "benchmarks/demo/prompts_eval.json").read_text())
    questions = [q["prompt"] for q in groups["unseen"][:16] + groups["seen"][:8]]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for question in questions
    ]
    return [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]


@pytest.fixture(scope="session")
def answers(
    prompts: list[list[int]],
    target: Path,
    draft: Path,
    permuted_draft: Path,
    stock_draft: Path,
    exported_draft: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Recorder:
    drafts = {"demo": draft, "permuted": permuted_draft, "stock": stock_draft, "exported": exported_draft}
    base = tmp_path_factory.getbasetemp()
    # The workers of one run have folders of their own below the run's.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "servers"
    folder.mkdir(exist_ok=True)
    return Recorder(prompts, folder, target, drafts)
