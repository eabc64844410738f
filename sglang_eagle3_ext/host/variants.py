"""The variants of a draft that a comparison serves: fc blocks in another order, ids that stock can read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_eagle3_ext import assembly
from sglang_eagle3_ext.formats import folder as checkpoint
from sglang_eagle3_ext.spec import AssemblyPlan, Boundary

if TYPE_CHECKING:
    from torch import Tensor

IDS_KEY = "eagle_aux_hidden_state_layer_ids"


def set_aside(path: Path) -> Path | None:
    """Give whatever lies at a path a backup name beside it (``bench.1.json``); return the new name."""
    if not path.exists():
        return None
    number = 1
    while (backup := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(backup)
    return backup


def other_order(plan: AssemblyPlan) -> tuple[int, ...] | None:
    """Find an order of the fc blocks other than the declared one, and not ascending if there is such a one.

    Returns:
        For each block of the copy the block of the draft it is, rotated; ``None`` with fewer than two blocks.
    """
    count = len(plan.boundaries)
    if count < 2:
        return None
    turns = [tuple((i - by) % count for i in range(count)) for by in range(1, count)]
    ranks = sorted(range(count), key=plan.block_of.__getitem__)
    return next((turn for turn in turns if [ranks[i] for i in turn] != list(range(count))), turns[0])


def resave(plan: AssemblyPlan, to: Path, order: Sequence[int]) -> Path:
    """Write a copy of a draft that declares its sources, and names them to stock by the best id list there is.

    Args:
        plan: the draft on its target.
        to: folder to write; one that is there gets a backup name. It appears whole or not at all.
        order: for each fc block of the copy the block of the draft it is.

    Returns:
        The folder.
    """
    from safetensors.torch import save_file

    source = Path(plan.spec.path)
    part = to.with_name(f"{to.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        for file in source.iterdir():
            # One file takes all tensors, so that indices and shards would only contradict it.
            if file.is_file() and file.suffix not in (".safetensors", ".bin") and ".index." not in file.name:
                shutil.copyfile(file, part / file.name)
        config = _config(plan, checkpoint.read_json(source / "config.json", "config_unreadable"), order)
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(_tensors(plan, source, order), part / "model.safetensors", metadata={"format": "pt"})
        set_aside(to)
        part.rename(to)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return to


def _config(plan: AssemblyPlan, config: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    """Declare the copy's sources to ours, and to stock where it reads ids at all."""
    ext = {
        **(config.get("eagle3_ext") or {}),
        "sources": [_spell(plan.boundaries[i]) for i in order],
        "order": "as_listed",
    }
    changed = {**config, "eagle3_ext": ext}
    if plan.spec.stock.loads and plan.stock_ids is not None:
        # Stock looks into eagle_config alone; a list beside it could only contradict.
        changed.pop(IDS_KEY, None)
        changed["eagle_config"] = {
            **(config.get("eagle_config") or {}),
            "use_aux_hidden_state": True,
            IDS_KEY: list(plan.stock_ids),
        }
    return changed


def _spell(boundary: Boundary) -> str:
    if boundary == "final_norm":
        return "final_norm"
    return f"layer{boundary - 1}" if boundary else "embed"


def _tensors(plan: AssemblyPlan, source: Path, order: Sequence[int]) -> dict[str, Tensor]:
    """Load every tensor of the draft under its own name, the blocks of fc and the norms tied to them moved."""
    spec, moved = plan.spec, replace(plan, block_of=tuple(order))
    # Cloned: tensors of a pickle may share memory, which safetensors refuses.
    tensors = {name: tensor.clone() for name, tensor in checkpoint.load_tensors(source, spec.tensors)}
    named = {canonical: name for name, canonical in spec.weights.items()}
    permuted = assembly.permute_tensors({key: tensors[name] for key, name in named.items()}, moved)
    return tensors | {named[key]: tensor.contiguous() for key, tensor in permuted.items()}
