"""A tiny pair served by the Triton kernels themselves, in the corrected interpreter; oracle: their PyTorch twins.

The target has two layers and is served in float32 on the CPU platform, twice: as it is, and with a plugin
(``interpreted.py``) that lets the kernels verify, project and norm. Tokens and accepted drafts are the same.
"""

from __future__ import annotations

import ast
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import servers
import torch
from checkpoints import write_draft, write_target

from sglang_eagle3_ext.host.servers import Server, running

pytestmark = pytest.mark.e2e

TESTS, KERNELS = Path(__file__).parents[1], Path(__file__).parents[2] / "kernels"
VOCAB, TOKENS = 16, 20
"""So few words that a draft without any training hits some."""
PROMPTS = (300, 5, 40)
"""Their lengths; the longest context is cut into several chunks."""


def kernel_names() -> set[str]:
    """Read the names of this package's kernels from their source."""
    functions = (
        node for path in KERNELS.glob("*.py") for node in ast.parse(path.read_text()).body if hasattr(node, "name")
    )
    return {function.name for function in functions if function.name.endswith("_kernel")}


def plugin(folder: Path) -> str:
    """Install ``interpreted.py`` in a folder as SGLang's plugins are; return what to put on PYTHONPATH."""
    about = folder / "interpreted_kernels-0.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: interpreted-kernels\nVersion: 0.0\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\ninterpreted_kernels = interpreted:register\n")
    for module in (TESTS / "test_e2e" / "interpreted.py", TESTS / "interpreter.py"):
        shutil.copy(module, folder)
    return str(folder)


@pytest.mark.parametrize(("name", "flags"), [("chain", servers.CHAIN), ("tree", servers.TREE)])
def test_kernels_give_the_tokens_of_their_twins(name: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    sizes = {"hidden": 64, "vocab": VOCAB}
    target = write_target(tmp_path / "target", num_layers=2, **sizes)
    sources = {"eagle3_ext": {"sources": ["embed", "layer0", "last"]}}
    draft = write_draft(tmp_path / "draft", draft_vocab=VOCAB, config_changes=sources, **sizes)
    launches = tmp_path / "launches.txt"
    words = [*servers.LAUNCH, *servers.arguments(target, draft, *flags, "--skip-tokenizer-init")]
    interpreted = {"PYTHONPATH": plugin(tmp_path / "plugin"), "INTERPRETED_LAUNCHES": str(launches)}
    pair = [
        Server("twins", words, tmp_path / "twins.log", servers.ENVIRONMENT),
        Server("kernels", words, tmp_path / "kernels.log", servers.ENVIRONMENT | interpreted),
    ]
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (length,), generator=g).tolist() for length in PROMPTS]
    with running(pair), ThreadPoolExecutor(len(prompts)) as clients:
        # All at once: ragged batches, which shrink as requests end.
        ask = partial(servers.complete, tokens=TOKENS)
        twins, kernels = (list(clients.map(partial(ask, server), prompts)) for server in pair)
    assert kernels == twins
    accepted = Counter({i: sum(n for a in kernels for n in a.histogram[i : i + 1]) for i in range(4)})
    assert sum(i * n for i, n in accepted.items()) > 3, f"hardly a draft was accepted: {accepted}"

    kinds = Counter(launches.read_text().splitlines())
    ran = {line.removeprefix("interpreted ") for line in kinds}
    assert ran <= kernel_names(), f"launched beside ours: {ran - kernel_names()}"
    steps = kinds["interpreted _plan_kernel"]
    assert max(answer.verify_steps for answer in kernels) <= steps <= sum(answer.verify_steps for answer in kernels)
    assert kinds["interpreted _tree_verify_gqa_kernel"] == kinds["interpreted _merge_kernel"] == 2 * steps
    assert kinds["interpreted _pack_mask_kernel"] == (steps if name == "tree" else 0)
    assert kinds["interpreted _norm_concat_kernel"] >= steps
    assert kinds["interpreted _fc_proj_kernel"] >= steps
    text, logs = "tree_verify_gqa (Triton)", [server.log.read_text(errors="replace") for server in pair]
    assert [text in log for log in logs] == [False, True]
    assert "fc_proj and norm_concat in Triton" in logs[1]
