"""A checkpoint folder as it lies on disk: its ``config.json`` and the headers of its tensors."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_eagle3_ext.errors import CheckpointError, first_line
from sglang_eagle3_ext.formats.eagle3_ext import OVERRIDE, Declared, merge
from sglang_eagle3_ext.formats.keys import shown, spell
from sglang_eagle3_ext.spec import Finding, Severity, TensorInfo, printable

if TYPE_CHECKING:
    from torch import Tensor

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONFIG_FILES = ("*.json",)
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def fatal(code: str, message: str) -> CheckpointError:
    """Build the error for a problem that leaves nothing to be checked further."""
    return CheckpointError.from_findings([Finding("error", code, message)])


def locate(path: str | os.PathLike[str], revision: str | None, *, weights: bool = True) -> Path:
    """Find a checkpoint: a local folder, else the snapshot of a Hub id.

    Args:
        path: local folder or Hub id.
        revision: branch, tag or commit of a Hub id; ignored for a local folder.
        weights: whether the weights are needed besides the JSON files.

    Returns:
        The local folder.

    Raises:
        CheckpointError: neither is there.
    """
    if not os.fspath(path):
        # The path of an empty name is the working folder, which nobody meant.
        raise fatal("no_checkpoint", "'': got an empty name; expected a checkpoint folder or a Hub id. Name one.")
    try:
        folder = Path(path).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
        if is_folder and not os.access(folder, os.R_OK):
            # Globbing takes a folder that may not be listed for an empty one.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, RuntimeError) as error:
        # A name that is too long, a folder that may not be entered, a home of nobody's.
        reason = error.strerror if isinstance(error, OSError) else error
        raise fatal(
            "no_checkpoint",
            f"{path}: cannot be looked up, got {reason}; expected a checkpoint folder or a Hub id. Check the path.",
        ) from error
    if is_folder:
        return folder
    if exists:
        raise fatal(
            "no_checkpoint",
            f"{path}: is a file; expected a folder with config.json. Name the folder that holds it.",
        )
    text = str(path)
    if not _HUB_ID.fullmatch(text):
        raise fatal(
            "no_checkpoint",
            f"{path}: no such folder; expected a checkpoint folder or a Hub id. Check the path.",
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise fatal(
            "no_checkpoint",
            f"{path}: no such folder, and huggingface_hub is not installed; expected a checkpoint folder. Check the "
            "path, or install huggingface_hub to read from the Hub.",
        ) from None
    patterns = [*_CONFIG_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        return Path(snapshot_download(text, revision=revision, allow_patterns=patterns))
    except Exception as error:
        # The Hub client raises errors of its own, of requests and of the operating system.
        reason = first_line(error)
        raise fatal(
            "no_checkpoint",
            f"{path}: no such folder, and the Hub gave nothing, got {reason}; expected a checkpoint folder or a Hub "
            "id. Check the spelling, the network and HF_HUB_OFFLINE.",
        ) from error


def read_json(file: Path, code: str) -> dict[str, Any]:
    """Read a JSON file whose top level is an object.

    Raises:
        CheckpointError: the file is absent, is no JSON or holds something else.
    """
    try:
        present = file.is_file()
        value = json.loads(file.read_text(encoding="utf-8")) if present else None
        # Half of a surrogate pair is JSON, and can neither be printed nor be written again.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, OSError, RecursionError) as error:
        raise fatal(
            code, f"{file}: cannot be read, got {error}; expected JSON. Repair or fetch the file again."
        ) from error
    if not present:
        got = "is no regular file" if os.path.lexists(file) else "no such file"
        raise fatal(code, f"{file}: {got}; expected a checkpoint with it. Check the folder.")
    if not isinstance(value, dict):
        raise fatal(
            code,
            f"{file}: got {type(value).__name__}; expected a JSON object. Repair or fetch the file again.",
        )
    return value


@dataclass
class Folder:
    """A checkpoint folder that has been opened; dialects read from it and add to ``findings``.

    Attributes:
        path: the folder.
        config: the content of ``config.json``.
        declared: the merged ``eagle3_ext`` object.
        tensors: tensor name -> header, of every weight file.
        findings: what was noticed so far.
        unreadable: what keeps ``config.json`` or weight files from being read; ``tensors`` is empty beside it.
        override_place: where the command line's ``eagle3_ext`` was given, for messages.
    """

    path: Path
    config: Mapping[str, Any]
    declared: Declared
    tensors: Mapping[str, TensorInfo]
    findings: list[Finding] = field(default_factory=list)
    unreadable: list[Finding] = field(default_factory=list)
    override_place: str = OVERRIDE

    @classmethod
    def open(cls, path: Path, override: Mapping[str, Any] | None, override_place: str = OVERRIDE) -> Folder:
        """Open a folder and read what lies in it, values of tensors aside.

        What cannot be read at all is in ``unreadable``, and what can be is there to be checked all the same.
        """
        unreadable: list[Finding] = []
        config: dict[str, Any] = {}
        try:
            config = read_json(path / "config.json", "config_unreadable")
        except CheckpointError as error:
            unreadable += error.findings
        place = f"{path}/config.json:eagle3_ext"
        declared, findings = merge(config.get("eagle3_ext"), override, place, override_place)
        tensors: dict[str, TensorInfo] = {}
        try:
            tensors = headers(path, findings)
        except CheckpointError as error:
            unreadable += error.findings
        folder = cls(path, config, declared, tensors, findings, unreadable, override_place)
        folder._check_architectures()
        return folder

    def _check_architectures(self) -> None:
        """Report class names that are no list; a single one is read as a list of one."""
        names = self.config.get("architectures")
        if names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            return
        example = names if isinstance(names, str) else "LlamaForCausalLMEagle3"
        self.add(
            "error",
            "config_type",
            "config.json:architectures",
            f"got {spell(names)}; expected a list of class names. Write it like [{spell(example)}].",
        )
        self.config = {**self.config, "architectures": [names] if isinstance(names, str) else None}

    def own_place(self, key: str) -> str:
        """Say where a key of the merged ``eagle3_ext`` stands: in ``config.json`` or on the command line."""
        is_override = self.declared.origins.get(key) == "override"
        return f"{self.override_place if is_override else 'config.json:eagle3_ext'}.{key}"

    def at(self, place: str) -> str:
        """Spell a place in full: what was given on a command line does not lie in the folder."""
        return place if place.startswith(self.override_place) else f"{self.path}/{place}"

    def add(self, severity: Severity, code: str, place: str, text: str) -> None:
        """Report a finding at a place in the folder or on the command line."""
        self.findings.append(Finding(severity, code, f"{self.at(place)}: {text}"))

    def is_reported(self, place: str) -> bool:
        """Say whether something was reported at this place already."""
        start = printable(f"{self.at(place)}: ")
        return any(finding.message.startswith(start) for finding in self.findings)

    def integers(self, name: str) -> list[int]:
        """Load a vector of integers or flags."""
        file = self.path / self.tensors[name].file
        if file.suffix != ".safetensors":
            return [int(value) for value in _load_pickle(file)[name].tolist()]
        from safetensors import safe_open

        # Through numpy, so that looking at a draft does not wait for torch.
        with safe_open(file, framework="numpy") as opened:
            return [int(value) for value in opened.get_tensor(name).tolist()]


def headers(path: Path, findings: list[Finding]) -> dict[str, TensorInfo]:
    """Read the header of every tensor, and check the files against their index.

    Args:
        path: the folder.
        findings: what leaves the headers readable is added here.

    Returns:
        Tensor name -> header.

    Raises:
        CheckpointError: there are no weights, or files or their index cannot be read; holds what is wrong with each.
    """
    safetensors = sorted(path.glob("*.safetensors"))
    pickles = sorted(path.glob("pytorch_model*.bin"))
    indices = sorted(path.glob("*.safetensors.index.json"))
    read = _safetensors_header
    files = safetensors
    # SGLang and transformers prefer safetensors where both lie side by side.
    if not safetensors and (pickles or not indices):
        files, read = pickles, _pickle_header
        indices = sorted(path.glob("pytorch_model*.bin.index.json"))
    index: dict[str, str] = {}
    unreadable: list[Finding] = []
    for file in indices:
        try:
            index.update(_weight_map(file))
        except CheckpointError as error:
            unreadable += error.findings
    absent = sorted({shard for shard in index.values() if not os.path.exists(path / shard)})
    if absent:
        unreadable.append(
            Finding(
                "error",
                "shard_absent",
                f"{indices[0]}:weight_map: names {shown(absent)}, which the folder lacks; expected every shard. Fetch "
                "the missing files.",
            )
        )
    if not files and not unreadable:
        raise fatal(
            "no_weights",
            f"{path}: no *.safetensors and no pytorch_model*.bin; expected the draft's weights. Check the folder.",
        )
    if index:
        extra = [file.name for file in files if file.name not in index.values()]
        files = [file for file in files if file.name in index.values()]
        if extra:
            findings.append(
                Finding(
                    "warning",
                    "shard_unlisted",
                    f"{indices[0]}:weight_map: does not name {shown(extra)}, got it in the folder; expected every "
                    "weight file to be named. Remove the file or correct the index.",
                )
            )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        try:
            header = read(file)
        except CheckpointError as error:
            unreadable += error.findings
            continue
        for name, info in header.items():
            if name in tensors:
                findings.append(
                    Finding(
                        "error",
                        "tensor_twice",
                        f"{file}:{name}: is also in {tensors[name].file}; expected each tensor once. Remove one of "
                        "the two files.",
                    )
                )
            tensors[name] = info
    if unreadable:
        raise CheckpointError.from_findings(unreadable)
    unfound = sorted(name for name in index if name not in tensors)
    if unfound:
        findings.append(
            Finding(
                "error",
                "index_disagrees",
                f"{indices[0]}:weight_map: names {shown(unfound)}, got no such tensor in the shards; expected "
                "index and shards to agree. Fetch the checkpoint again.",
            )
        )
    moved = sorted(name for name, shard in index.items() if name in tensors and tensors[name].file != shard)
    if moved:
        findings.append(
            Finding(
                "warning",
                "index_disagrees",
                f"{indices[0]}:weight_map: got {index[moved[0]]} for {shown(moved)}, where it is not; expected "
                f"{tensors[moved[0]].file} for the first. The shards were believed; correct the index.",
            )
        )
    return tensors


def _weight_map(file: Path) -> dict[str, str]:
    """Read which shard holds which tensor by an index."""
    weight_map = read_json(file, "index_unreadable").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise fatal(
            "index_unreadable",
            f"{file}:weight_map: got {spell(weight_map)}; expected an object of file names. Fetch the file again.",
        )
    # What lies elsewhere, or is no weight file by its name, is read by nobody, since engines list the folder.
    kind = ".safetensors" if file.name.endswith(".safetensors.index.json") else ".bin"
    elsewhere = sorted(
        {shard for shard in weight_map.values() if Path(shard).name != shard or not shard.endswith(kind)}
    )
    if elsewhere:
        raise fatal(
            "index_unreadable",
            f"{file}:weight_map: got {shown([spell(shard) for shard in elsewhere])}; expected names of *{kind} files "
            "in the folder. Fetch the file again.",
        )
    return weight_map


_POINTER = b"version https://git-lfs.github.com/spec/"
"""How the file begins that Git LFS leaves in the place of another one."""


def _begin(file: Path, kind: str) -> bytes:
    """Read the first bytes of a weight file, before its library meets what is none.

    Raises:
        CheckpointError: it is no regular file, may not be read, or only points to the file that it stands for.
    """
    try:
        # A pipe would be waited for, and the library calls a folder an absent device.
        if not stat.S_ISREG(file.stat().st_mode):
            what = "a folder" if file.is_dir() else "no regular file"
            raise fatal(
                "weights_unreadable", f"{file}: got {what}; expected a {kind} file. Remove it, or put the file there."
            )
        with open(file, "rb") as opened:
            start = opened.read(len(_POINTER))
    except OSError as error:
        raise fatal(
            "weights_unreadable",
            f"{file}: cannot be read, got {error.strerror or first_line(error)}; expected a whole {kind} file. Check "
            "its rights, or fetch it again.",
        ) from error
    if start == _POINTER:
        raise fatal(
            "weights_unreadable",
            f"{file}: got a pointer of Git LFS; expected the {kind} file that it stands for. Fetch that: git lfs pull.",
        )
    return start


def _safetensors_header(file: Path) -> dict[str, TensorInfo]:
    from safetensors import SafetensorError, safe_open

    _begin(file, "safetensors")
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
            return {
                name: TensorInfo(tuple(part.get_shape()), part.get_dtype(), file.name) for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise fatal(
            "weights_unreadable",
            f"{file}: cannot be read, got {error}; expected a whole safetensors file. Fetch the file again.",
        ) from error


# The spellings of safetensors, so that a header reads the same from either kind of file.
_DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


def _pickle_header(file: Path) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(tuple(tensor.shape), _DTYPES.get(str(tensor.dtype), str(tensor.dtype)), file.name)
        for name, tensor in _load_pickle(file).items()
    }


_PICKLES = (b"PK", b"\x80")
"""How a PyTorch file begins: the zip container, and the pickle of the time before it."""


def _load_pickle(file: Path) -> dict[str, Tensor]:
    import torch

    start = _begin(file, "PyTorch")
    try:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            # Files of the time before the zip container cannot be mapped.
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # A pickle is a program, and a broken one can stop in any way.
        reason = first_line(error)
        if not start.startswith(_PICKLES):
            reason = "content that is no PyTorch file"
        elif "GLOBAL" in str(error) or "unrecognized function" in str(error):
            # PyTorch's own words advise to run what the file brings along.
            reason = "content other than tensors, which is never run"
        elif not isinstance(error, OSError | EOFError | RuntimeError):
            reason = "a broken PyTorch file"
        raise fatal(
            "weights_unreadable",
            f"{file}: cannot be read, got {reason}; expected a whole PyTorch file of tensors. Fetch the file again.",
        ) from error
    odd: list[str] = [type(content).__name__]
    if isinstance(content, dict):
        odd = [f"{name!r} ({_kind(value)})" for name, value in content.items() if not _is_plain(name, value)]
    if odd:
        raise fatal(
            "weights_unreadable",
            f"{file}: got {shown(odd, 2)}; expected a mapping from names to tensors, dense ones. Save "
            "the model's state dict, as safetensors if you can.",
        )
    tensors: dict[str, Tensor] = content
    return tensors


def _is_plain(name: object, value: object) -> bool:
    """Say whether an entry of a PyTorch file is a name and a tensor with values of its own."""
    import torch

    return (
        isinstance(name, str)
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not (value.is_nested or value.is_meta or value.is_quantized)
        # Else one value stands for many, and a few bytes for any number of them.
        and value.untyped_storage().nbytes() >= value.numel() * value.element_size()
    )


def _kind(value: object) -> str:
    import torch

    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.is_nested:
        return "nested"
    return f"{value.layout}, {value.dtype}, {value.device}, {list(value.shape)}"


def load_tensors(path: Path, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    """Load tensors one by one on the CPU, each file opened once.

    Args:
        path: the checkpoint's folder.
        tensors: which to load: name -> header, as in ``DraftSpec.tensors``.

    Returns:
        An iterator over the names and the tensors, in the files' order.
    """
    by_file: dict[str, list[str]] = {}
    for name, info in tensors.items():
        by_file.setdefault(info.file, []).append(name)
    for file_name, names in sorted(by_file.items()):
        file = path / file_name
        if file.suffix == ".safetensors":
            yield from _load_safetensors(file, names)
        else:
            content = _load_pickle(file)
            yield from ((name, content[name]) for name in names)


def load_parts(path: Path, name: str, info: TensorInfo, size: int) -> Iterator[Tensor]:
    """Load a tensor of a safetensors file some rows at a time, on the CPU.

    Args:
        path: the checkpoint's folder.
        name: the tensor.
        info: its header.
        size: the number of values in a part, about.

    Returns:
        An iterator over [rows, ...] parts, each of which is to be done with before the next.
    """
    rows = max(1, size // max(1, math.prod(info.shape[1:])))
    for start in range(0, info.shape[0] if info.shape else 1, rows):
        # Opened for each, since the pages of a mapped file stay in memory until it is closed.
        with _opened(path / info.file) as file:
            yield file.get_slice(name)[start : start + rows] if info.shape else file.get_tensor(name)


def _load_safetensors(file: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    with _opened(file) as opened:
        for name in names:
            yield name, opened.get_tensor(name)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file, and say what keeps its values from being read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, NotImplementedError, OSError) as error:
        raise fatal(
            "weights_unreadable",
            f"{file}: values cannot be read, got {first_line(error)}; expected numbers of a type that PyTorch has. "
            "Use the unquantised checkpoint, or fetch the file again.",
        ) from error
