"""Writing the demo's target: whole or not at all, and only once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.demo import target


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the dequantiser (which needs the model) by one that writes a small file."""
    made: list[Path] = []

    def write(gguf: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "model.safetensors.sha256").write_text(target.file_sha256(folder / "model.safetensors"))

    monkeypatch.setattr(target, "find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(target, "dequantise", write)
    return made


def test_second_run_does_nothing(tmp_path: Path, calls: list[Path]):
    folder = tmp_path / "demo" / "target"
    assert target.make_target(folder) == folder
    assert target.is_complete(folder)
    target.make_target(folder)
    assert len(calls) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("damage", ["truncated", "unrecorded"])
def test_a_damaged_folder_is_written_again(tmp_path: Path, calls: list[Path], damage: str):
    folder = target.make_target(tmp_path / "target")
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"weig")
    else:
        (folder / "model.safetensors.sha256").unlink()
    target.make_target(folder)
    assert len(calls) == 2
    assert target.is_complete(folder)


def test_a_failure_leaves_no_folder(tmp_path: Path, calls: list[Path], monkeypatch: pytest.MonkeyPatch):
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(target, "dequantise", fail)
    with pytest.raises(OSError, match="disk full"):
        target.make_target(tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_tensor_hash_sees_values_names_and_types_but_not_the_layout(tmp_path: Path):
    a, b = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), torch.ones(5)

    def digest(name: str, tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, tmp_path / name)
        return target.tensors_sha256(tmp_path / name)

    same = {digest("1", {"a": a, "b": b}), digest("2", {"b": b, "a": a})}
    assert len(same) == 1
    others = [
        digest("3", {"a": a, "b": b * 2}),
        digest("4", {"c": a, "b": b}),
        digest("5", {"a": a.reshape(3, 2), "b": b}),
        digest("6", {"a": a.view(torch.float16), "b": b}),
    ]
    assert len({*same, *others}) == 5
