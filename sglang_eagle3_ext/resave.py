"""Write a draft anew: ``configure`` declares its assembly, ``export`` permutes it for engines without this package.

Both change ``config.json`` as text, so that what is not edited stays byte for byte, and both let the reader itself
(``formats.read_draft``, ``assembly.plan``) judge the result before anything stands at its final place.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fcntl
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from sglang_eagle3_ext import assembly
from sglang_eagle3_ext.errors import CheckpointError, UnsupportedError
from sglang_eagle3_ext.formats import IGNORED, read_draft, read_target, read_tensors
from sglang_eagle3_ext.formats.flat import STOCK_ARCHITECTURE, STOCK_MLA_ARCHITECTURE
from sglang_eagle3_ext.formats.folder import locate, read_json
from sglang_eagle3_ext.formats.values import in_parts, not_finite
from sglang_eagle3_ext.json_text import REMOVE, Edit, edit_json
from sglang_eagle3_ext.spec import AssemblyPlan, Boundary, DraftSpec, Finding, TargetFacts

Engine = Literal["stock", "vllm"]
ENGINES: dict[Engine, str] = {"stock": "stock SGLang", "vllm": "vLLM"}

_EXT = "eagle3_ext"
_IDS = "eagle_aux_hidden_state_layer_ids"
_CHUNK = 16 << 20
_WEIGHTS = re.compile(
    r".*\.safetensors|.*\.safetensors\.index\.json|pytorch_model.*\.bin|pytorch_model.*\.bin\.index\.json"
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``configure`` and ``export`` to the command line."""
    configure = commands.add_parser(
        "configure",
        help="write into a draft how it was trained",
        description="Write the eagle3_ext object into a draft's config.json, and the ids for stock SGLang where they "
        "can say the same. Everything else stays byte for byte; the old file is kept as config.json.bak.",
    )
    configure.add_argument("draft", metavar="DRAFT", help="folder of the draft; a Hub id needs --out or --print")
    configure.add_argument(
        "--set",
        dest="assignments",
        type=_assignment,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of eagle3_ext, such as sources=embed,layer3,layer31; other values are JSON or plain words",
    )
    configure.add_argument("--unset", action="append", default=[], metavar="KEY", help="remove a key of eagle3_ext")
    configure.add_argument("--target", help="folder or Hub id of the target; needed for the ids of stock SGLang")
    add_revisions(configure)
    where = configure.add_mutually_exclusive_group()
    where.add_argument("--out", metavar="DIR", help="write a complete copy of the draft there instead")
    where.add_argument("--print", action="store_true", help="print the new config.json and write nothing")
    configure.set_defaults(command=_configure, refuse_in_place=_refuse_in_place)

    export = commands.add_parser(
        "export",
        help="write a copy that an engine without this package serves right",
        description="Write a copy of a draft whose fc columns stand in the order in which an engine captures, and "
        "whose ids are that engine's; or say why there is none. Exit code 1 when there is none.",
    )
    export.add_argument("draft", metavar="DRAFT", help="folder or Hub id of the draft")
    export.add_argument("--for", dest="engine", choices=sorted(ENGINES), required=True, help="the engine")
    export.add_argument("--target", required=True, help="folder or Hub id of the target")
    export.add_argument("--out", metavar="DIR", required=True, help="folder to write; absent or empty")
    add_revisions(export)
    export.set_defaults(command=_export)


def add_revisions(command: argparse.ArgumentParser) -> None:
    """Add the flags that say which revision of a draft and of a target on the Hub is meant."""
    command.add_argument("--revision", help="branch, tag or commit of the draft on the Hub")
    command.add_argument("--target-revision", metavar="REVISION", help="the same for the target")


def _assignment(text: str) -> tuple[str, Any]:
    """Read ``KEY=VALUE``; what the value must be is the reader's business."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected text in UTF-8. Type it anew.") from error
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected KEY=VALUE such as sources=embed,layer3,layer31. Write it so."
        )
    if key == "sources" and not value.startswith("["):
        return key, [source.strip() for source in value.split(",")]

    try:
        parsed = json.loads(value)
        # Numbers that JSON has no word for, 1e999 among them, stay text, which the reader refuses.
        written = json.dumps(parsed, allow_nan=False, ensure_ascii=False)
    except (ValueError, RecursionError):
        return key, value
    try:
        written.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, half of a surrogate pair; expected whole characters. Write both halves or neither."
        ) from error
    return key, parsed


# ---- configure ------------------------------------------------------------------------------------------


def _configure(args: argparse.Namespace) -> int:
    folder = locate(args.draft, args.revision)
    file = folder / "config.json"
    config = read_json(file, "config_unreadable")
    in_place = args.out is None and not args.print
    edits = _ext_edits(f"{file}", config, args.assignments, args.unset)
    if in_place:
        _refuse_in_place(args.draft, file)
    out = _free(args.out, folder) if args.out is not None else None
    # As bytes: universal newlines would change the line ends of the file.
    old = file.read_bytes().decode("utf-8")
    new = edit_json(old, edits)
    target: TargetFacts | None = None
    if args.target:
        try:
            target = read_target(args.target, revision=args.target_revision)
        except CheckpointError as error:
            raise CheckpointError.from_findings([*_errors(folder, new), *error.findings]) from None
    spec, plan = _judge(folder, new, target)
    ids, note = _stock_ids(spec, plan, config)
    if ids:
        new = edit_json(new, ids)
        declared = plan
        spec, plan = _judge(folder, new, target)
        if declared is None or plan is None or plan.boundaries != declared.boundaries:
            raise UnsupportedError(
                f"{file}:eagle_config.{_IDS}: would change which hidden states are read; expected the declared ones. "
                "Leave out --target, and report it."
            )
    _say(f.message for f in spec.findings if f.severity == "warning")
    _say([note])
    nested = config.get("eagle_config")
    held = nested.get(_IDS) if isinstance(nested, dict) else None
    if held is not None and not ids:
        _say([f"{file}:eagle_config.{_IDS}: still holds {held}, by which stock SGLang would serve this draft"])
    if plan is not None and not plan.equals_stock:
        _say(f"stock SGLang would still serve another draft: {difference}" for difference in plan.differences)

    if args.print:
        sys.stdout.write(new)
        sys.stderr.writelines(_diff(old, new))
    elif out is not None:
        with _staged(out) as stage:
            _copy(folder, stage, [path for path in _files(folder) if path != Path("config.json")])
            (stage / "config.json").write_bytes(new.encode("utf-8"))
        sys.stdout.write(f"wrote {out}\n")
    elif new == old:
        sys.stdout.write(f"{file} says so already; nothing was written\n")
    else:
        backup = _replace(file, old.encode("utf-8"), new.encode("utf-8"))
        sys.stdout.write(f"wrote {file}\nkept {backup}\n")
    return 0


def _say(lines: Iterable[str]) -> None:
    """Write remarks to stderr, which leaves stdout to what was asked for."""
    sys.stderr.writelines(f"{line}\n" for line in lines)


def _diff(old: str, new: str) -> Iterator[str]:
    """Compare two texts line by line, for reading."""
    for line in difflib.unified_diff(
        old.splitlines(), new.splitlines(), "config.json", "config.json (new)", lineterm=""
    ):
        yield f"{line}\n"


def _ext_edits(
    file: str, config: Mapping[str, Any], assignments: Sequence[tuple[str, Any]], unset: Sequence[str]
) -> list[Edit]:
    """Turn ``--set`` and ``--unset`` into edits, or report all that is wrong with them as such."""
    problems = []
    stored = config.get(_EXT)
    if stored is not None and not isinstance(stored, dict):
        problems.append(f"{file}:{_EXT}: got {stored!r}; expected an object. Remove or correct it by hand.")
    keys = [key for key, _ in assignments]
    ext: dict[str, Any] = dict(stored) if isinstance(stored, dict) else {}
    if not keys and not unset:
        problems.append("--set: got no key to change; expected --set KEY=VALUE or --unset KEY. Name one.")
    for key in sorted({key for key in keys if keys.count(key) > 1} | (set(keys) & set(unset))):
        problems.append(f"--set {key}: got it more than once; expected each key once. Remove one of them.")
    for key in sorted(set(unset) - set(ext) - set(keys)):
        held = ", ".join(ext) or "no key"
        problems.append(f"--unset {key}: is not in {file}:{_EXT}, got {held}; expected a key of it. Correct the key.")
    if problems:
        raise CheckpointError("\n".join(problems))
    if not assignments and set(ext) <= set(unset):
        return [((_EXT,), REMOVE)]
    return [*(((_EXT, key), value) for key, value in assignments), *(((_EXT, key), REMOVE) for key in unset)]


def _refuse_in_place(draft: str, file: Path) -> None:
    """Refuse to write where the change would reach more than this draft, or nowhere."""
    advice = "Write a copy with --out DIR, or look at the result with --print."
    if not Path(draft).expanduser().is_dir():
        raise CheckpointError(f"{draft}: is a Hub id; expected a folder to write into. {advice}")
    problems = []
    real = file.resolve()
    if file.is_symlink():
        problems.append(f"{file}: is a link, got {real}, which others may share; expected a file of the draft's own.")
    elif "snapshots" in real.parts and any(part.startswith("models--") for part in real.parts):
        problems.append(f"{file}: lies in the Hub cache, which is shared; expected a folder of the draft's own.")
    # The mode is asked as well, since root may write everywhere.
    for place in (file, file.parent):
        if not os.access(place, os.W_OK) or not stat.S_IMODE(place.stat().st_mode) & 0o222:
            problems.append(f"{place}: is read-only; expected a draft that may be changed.")
    if problems:
        raise CheckpointError("\n".join(f"{problem} {advice}" for problem in problems))


def _errors(folder: Path, text: str) -> tuple[Finding, ...]:
    """List what would be wrong with a draft with this ``config.json`` on any target."""
    try:
        _judge(folder, text, None)
    except CheckpointError as error:
        return error.findings
    return ()


def _judge(folder: Path, text: str, target: TargetFacts | None) -> tuple[DraftSpec, AssemblyPlan | None]:
    """Let the reader say what a draft with this ``config.json`` would be; raise its errors, all at once."""
    with tempfile.TemporaryDirectory(prefix="sglang-eagle3-") as scratch:
        for path in folder.iterdir():
            if path.is_file() and path.name != "config.json":
                (Path(scratch) / path.name).symlink_to(path.resolve())
        (Path(scratch) / "config.json").write_bytes(text.encode("utf-8"))

        def rename(findings: Iterable[Finding]) -> tuple[Finding, ...]:
            return tuple(replace(f, message=f.message.replace(scratch, str(folder))) for f in findings)

        try:
            spec = read_draft(scratch)
        except CheckpointError as error:
            findings = rename((*error.findings, *assembly.findings_of_remains(error, target)))
            raise CheckpointError.from_findings(findings) from None
    spec = replace(
        spec,
        path=str(folder),
        sources_place=spec.sources_place.replace(scratch, str(folder)),
        findings=rename(spec.findings),
    )
    plan = assembly.plan(spec, target) if target is not None else None
    findings = plan.findings if plan is not None else assembly.findings_without_target(spec)
    spec = replace(spec, findings=findings)
    if any(f.severity == "error" for f in findings):
        raise CheckpointError.from_findings(findings)
    return spec, plan


def _stock_ids(spec: DraftSpec, plan: AssemblyPlan | None, config: Mapping[str, Any]) -> tuple[list[Edit], str]:
    """Say the sources in stock's own ids where they can be said; in words, whether and why not."""
    cannot = "ids for stock SGLang were not written: "
    if spec.sources is None or spec.origins["sources"] != _EXT:
        return [], f"{cannot}eagle3_ext names no sources"
    if plan is None:
        return [], f"{cannot}they depend on the target, name it with --target"
    words = ", ".join(assembly.spell(b, plan.target.num_layers) for b in plan.boundaries)
    if not spec.stock.loads:
        return [], f"{cannot}{spec.stock.differences[0]}"
    if plan.stock_ids is None:
        return [], f"{cannot}it cannot capture {words} on {plan.target.architecture}"
    if not plan.is_identity:
        return [], f"{cannot}it concatenates in ascending order, not {words}; export writes a copy in that order"
    ids = list(plan.stock_ids)
    if config.get(_IDS) not in (None, ids):
        return [], f"{cannot}config.json:{_IDS} holds {config[_IDS]} for vLLM, and two lists would disagree"
    edits: list[Edit] = [(("eagle_config", _IDS), ids), (("eagle_config", "use_aux_hidden_state"), True)]
    return edits, f"stock SGLang captures the same states by the ids {ids}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes of this program out of a folder while something in it is replaced."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _replace(file: Path, expected: bytes, content: bytes) -> Path:
    """Put new content into a file in one step, and keep the old one beside it under a name that was free."""
    fresh = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
    try:
        with _alone(file.parent):
            if file.read_bytes() != expected:
                raise CheckpointError(
                    f"{file}: got another content than a moment ago; expected nobody else to change it. Run it again."
                )
            old = file.stat()
            names = (f"{file.name}.bak{number or ''}" for number in range(10_000))
            backup = next(path for path in map(file.with_name, names) if not os.path.lexists(path))
            _write_new(fresh, content)
            os.chmod(fresh, stat.S_IMODE(old.st_mode))
            with contextlib.suppress(PermissionError):
                os.chown(fresh, old.st_uid, old.st_gid)
            _write_new(backup, expected)
            shutil.copystat(file, backup)
            os.replace(fresh, file)
    except OSError as error:
        raise _unwritable(file, error) from error
    finally:
        fresh.unlink(missing_ok=True)
    return backup


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that is not there yet, down to the disk."""
    with open(path, "xb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


# ---- export ---------------------------------------------------------------------------------------------


def _export(args: argparse.Namespace) -> int:
    plan = assembly.plan_pair(args.draft, args.target, revision=args.revision, target_revision=args.target_revision)
    spec = plan.spec
    name = ENGINES[args.engine]
    reasons = list(_reasons(args.engine, plan))
    if reasons:
        listed = "\n".join(f"  {name} {reason}" for reason in reasons)
        raise UnsupportedError(
            f"{spec.path}: cannot be written for {name}; expected a draft that it computes as trained, got one where\n"
            f"{listed}\nServe it in SGLang with this package installed, which needs no other file."
        )
    folder, out = Path(spec.path), _free(args.out, Path(spec.path))
    text = _engine_config(args.engine, plan, folder)
    with _staged(out) as stage:
        (stage / "config.json").write_bytes(text.encode("utf-8"))
        _write_weights(args.engine, plan, stage)
        kept = [path for path in _files(folder) if path != Path("config.json") and not _WEIGHTS.fullmatch(path.name)]
        _copy(folder, stage, kept)
        written = _verify(args.engine, plan, stage)
    _say(f.message for f in plan.findings if f.severity == "warning")
    words = " | ".join(assembly.spell(b, plan.target.num_layers) for b in written.boundaries)
    how = "as stored" if plan.is_identity else f"permuted, the blocks {list(plan.block_of)} of the original"
    sys.stdout.write(f"wrote {out} for {name}\n{'fc <-' if spec.fc_in else 'reads'} {words}; columns {how}\n")
    if args.engine == "vllm":
        _say(["what vLLM computes was read from its source of early 2026 and not tried; see docs/configure.md"])
    return 0


def _reasons(engine: Engine, plan: AssemblyPlan) -> Iterator[str]:
    """Name everything that an engine computes otherwise, however the files are written."""
    spec, norms, a = plan.spec, plan.spec.norms, plan.spec.attention
    words = " | ".join(assembly.spell(b, plan.target.num_layers) for b in plan.capture)
    has_fc = spec.fc_in is not None
    own_shared = spec.embed == "own" and spec.hidden_size == spec.target_hidden_size
    rows: list[tuple[object, str]] = [
        (not norms.final_norm, "applies a final norm before the head, this draft has none"),
        (a.qk_norm, "has no q and k norms in the draft's attention"),
    ]
    if engine == "stock":
        rows += [
            (has_fc and plan.stock_ids is None, f"cannot capture [{words}] on {plan.target.architecture}"),
            (spec.fc_in == spec.hidden_size, "skips fc, because its input is as wide as the draft"),
            (norms.residual == "post_norm", "adds attention to the fc output before hidden_norm, not after it"),
            (a.qkv_bias, "drops the biases of q, k and v"),
            (spec.mlp_bias, "drops the biases of the MLP"),
            (spec.fc_bias and a.kind == "gqa" and not a.o_bias, "builds o_proj with a bias wherever fc has one"),
            *_latent_reasons(spec),
            (a.sliding_window, f"attends to the whole context, not to a window of {a.sliding_window}"),
            (
                own_shared,
                "puts the target's embedding in the place of the draft's own (where it is only a copy, which "
                "inspect --weights says, set embed=target with configure first)",
            ),
        ]
    else:
        rows += [
            (a.kind == "mla", "has classes of its own for latent attention, whose reading has not been looked at"),
            (has_fc and "final_norm" in plan.capture, "cannot capture the state after the final norm"),
            (has_fc and len(plan.capture) != 3, f"builds fc for 3 sources, not {len(plan.capture)}"),
            (norms.around_fc != "none", f"applies no norm around fc, this draft one {norms.around_fc}"),
            (norms.recurrent_state == "post_norm", "recycles the state before the final norm"),
            (spec.fc_bias, "has no bias in fc"),
            (a.qkv_bias != a.o_bias, "has one flag for the biases of q, k, v and o, which differ here"),
            (a.sliding_window, f"is not known to keep the draft's window of {a.sliding_window}"),
            (spec.lm_head != "own", "needs a head in the draft's own file"),
        ]
    yield from (sentence for applies, sentence in rows if applies)


def _latent_reasons(spec: DraftSpec) -> Iterator[tuple[object, str]]:
    """Name what stock's class for latent attention computes otherwise."""
    a = spec.attention
    if a.latent is None:
        return
    yield a.num_layers > 1, f"builds MLA drafts of one layer only, not of {a.num_layers}"
    yield a.latent.q_lora_rank is None, "needs a latent of the queries (q_lora_rank), which this draft has not"
    yield spec.norms.around_fc == "concatenation", "applies no norm over the concatenation in an MLA draft"
    yield not spec.rope.interleaved, "rotates neighbouring elements of a head together, not its halves"


def _engine_config(engine: Engine, plan: AssemblyPlan, folder: Path) -> str:
    """Describe the draft in the flat layout that both engines read, starting from its own ``config.json``."""
    text = (folder / "config.json").read_bytes().decode("utf-8")
    config = json.loads(text)
    if plan.spec.format == "speculators":
        # What was measured of the draft and how strict to be stand one level up.
        config = config["transformer_layer_config"] | ({_EXT: config[_EXT]} if _EXT in config else {})
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    differing = [edit for edit in _flat_edits(engine, plan, config) if _lookup(config, edit[0]) != edit[1]]
    return edit_json(text, differing)


def _lookup(config: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Find a member; ``REMOVE`` where there is none."""
    value: Any = config
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return REMOVE
        value = value[key]
    return value


def _flat_edits(engine: Engine, plan: AssemblyPlan, config: Mapping[str, Any]) -> Iterator[Edit]:
    """Say every fact of the draft where the engines look for it."""
    spec, norms, a = plan.spec, plan.spec.norms, plan.spec.attention
    yield ("architectures",), [STOCK_ARCHITECTURE if a.latent is None else STOCK_MLA_ARCHITECTURE]
    if "model_type" not in config:
        yield ("model_type",), "llama" if a.latent is None else "deepseek_v3"
    # Of latent attention, transformers calls the rotated part head_dim, and fills it in by itself.
    sizes = {"head_dim": a.head_dim} if a.latent is None else asdict(a.latent)
    for key, value in (
        ("hidden_size", spec.hidden_size),
        ("num_attention_heads", a.heads),
        ("num_key_value_heads", a.kv_heads),
        *sizes.items(),
        ("num_hidden_layers", a.num_layers),
        ("vocab_size", spec.vocab.target),
        ("rms_norm_eps", spec.rms_norm_eps),
        ("hidden_act", spec.hidden_act),
        ("max_position_embeddings", spec.max_position_embeddings),
    ):
        yield (key,), value
    llama4 = config.get("model_type") == "llama4_text" and config.get("intermediate_size_mlp") is not None
    yield ("intermediate_size_mlp" if llama4 else "intermediate_size",), spec.intermediate_size
    # Stock takes the target's head where the size is null, and a random one where it is given without a head.
    yield ("draft_vocab_size",), None if spec.lm_head == "target" else spec.vocab.draft
    yield ("target_hidden_size",), REMOVE if spec.target_hidden_size == spec.hidden_size else spec.target_hidden_size
    if spec.dtype is not None and config.get("dtype") is None and config.get("torch_dtype") is None:
        yield ("torch_dtype",), spec.dtype
    if a.sliding_window is None and config.get("sliding_window") is not None:
        # Copied from the target by a trainer that attends to everything; the engines would believe it.
        for key in ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"):
            yield (key,), REMOVE
    yield from _rope_edits(spec, config)
    bias = a.o_bias if engine == "stock" else a.qkv_bias
    for key, flag in (
        ("tie_word_embeddings", spec.lm_head == "tied"),
        ("fc_norm", norms.around_fc == "per_source"),
        ("norm_before_fc", norms.around_fc == "concatenation"),
        ("norm_output", norms.recurrent_state == "post_norm"),
        ("norm_before_residual", norms.residual == "post_norm"),
        ("bias", spec.fc_bias),
        ("attention_bias", bias),
        ("qkv_bias", a.qkv_bias),
        ("mlp_bias", spec.mlp_bias),
    ):
        if flag or config.get(key):
            yield (key,), flag
        yield ("eagle_config", key), REMOVE
    yield ("use_aux_norm",), REMOVE
    yield ("num_aux_hidden_states",), REMOVE
    # Each engine finds its own list only, so that neither reads the other's.
    ids = None if spec.fc_in is None else list((plan.stock_ids if engine == "stock" else plan.capture) or ())
    yield ("eagle_config", "use_aux_hidden_state"), ids is not None
    yield ("eagle_config", _IDS), ids if ids is not None and engine == "stock" else REMOVE
    yield (_IDS,), ids if ids is not None and engine == "vllm" else REMOVE
    stored = config.get(_EXT) or {}
    ext = {key: stored[key] for key in ("expected", "strict") if key in stored}
    if norms.recurrent_state == "post_norm":
        ext["recurrent_state"] = norms.recurrent_state
    yield (_EXT,), {"sources": [_source(boundary) for boundary in plan.capture], **ext}


def _rope_edits(spec: DraftSpec, config: Mapping[str, Any]) -> Iterator[Edit]:
    """Write the rotary embedding out where ``eagle3_ext`` had the last word on it, or stock reads what stands there."""
    written = config.get("rope_scaling") or config.get("rope_parameters") or {}
    is_misread = written.get("rope_type", written.get("type")) == "dynamic" or isinstance(written.get("factor"), int)
    if spec.rope.partial_rotary_factor != 1.0:
        yield ("partial_rotary_factor",), spec.rope.partial_rotary_factor
    settled = spec.origins["rope_theta"] != "config" or spec.origins["rope_scaling"] not in ("config", "default")
    if settled or is_misread:
        yield ("rope_parameters",), REMOVE
        yield ("rope_theta",), spec.rope.theta
        yield ("rope_scaling",), None if spec.rope.scaling is None else dict(spec.rope.scaling)


def _source(boundary: Boundary) -> str:
    """Spell a boundary as a source."""
    if boundary == "final_norm":
        return boundary
    return f"layer{boundary - 1}" if boundary else "embed"


def _write_weights(engine: Engine, plan: AssemblyPlan, stage: Path) -> None:
    """Write one file with the columns of fc, and the norms tied to them, in the order of capture.

    Raises:
        CheckpointError: weights are no numbers.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    spec = plan.spec
    tensors: dict[str, torch.Tensor] = {}
    findings: list[Finding] = []
    stored = {canonical: f"{spec.path}/{spec.tensors[name].file}:{name}" for name, canonical in spec.weights.items()}
    total = sum(not name.startswith(IGNORED) for name in spec.weights.values())
    with _progress(total, "tensor") as advance:
        for name, tensor in read_tensors(spec):
            findings += not_finite(stored[name], in_parts(tensor))
            if name == "d2t" and spec.vocab.map == "absolute":
                tensor = tensor.to(torch.int64) - torch.arange(len(tensor))
            elif match := re.fullmatch(r"layers\.([1-9]\d*)\.input_layernorm\.weight", name):
                # Stock knows this norm by the name of another one of the first layer.
                name = f"layers.{match[1]}.hidden_norm.weight" if engine == "stock" else name
            # Cloned, since two names may share one storage in a file of PyTorch's, which safetensors refuses.
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
            advance(1)
    if findings:
        raise CheckpointError.from_findings(findings)
    tensors = {name: tensor.contiguous() for name, tensor in assembly.permute_tensors(tensors, plan).items()}
    try:
        save_file(tensors, stage / "model.safetensors", metadata={"format": "pt"})
        # safetensors writes for its owner alone, and the server may be somebody else.
        shutil.copymode(stage / "config.json", stage / "model.safetensors")
    except SafetensorError as error:
        raise _unwritable(stage.parent, error) from error


def _verify(engine: Engine, plan: AssemblyPlan, stage: Path) -> AssemblyPlan:
    """Read what was written, and refuse it where it is not the same draft."""
    before = plan.spec
    after = read_draft(stage)
    written = assembly.plan(after, plan.target)
    changed = [
        name
        for name in (
            "num_sources", "target_hidden_size", "hidden_size", "intermediate_size", "fc_in", "fc_bias", "mlp_bias",
            "norms", "attention", "rope", "embed", "lm_head", "rms_norm_eps", "hidden_act", "max_position_embeddings",
        )
        if getattr(before, name) != getattr(after, name)
    ]  # fmt: skip
    problems = [f"{name}: {getattr(before, name)} became {getattr(after, name)}" for name in changed]
    problems += [f.message for f in written.findings if f.severity == "error"]
    if written.boundaries != plan.capture:
        problems.append(f"boundaries: {list(plan.capture)} became {list(written.boundaries)}")
    if engine == "stock":
        problems += written.differences
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems).replace(str(stage), before.path)
        raise UnsupportedError(
            f"{before.path}: the copy for {ENGINES[engine]} would be another draft; expected the same, got\n{listed}\n"
            "Serve the original in SGLang with this package installed."
        )
    return written


# ---- folders --------------------------------------------------------------------------------------------


def _unwritable(place: Path, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"{place}: cannot be written, got {error}; expected a writable place with room. Free some, or choose another."
    )


def _free(out: str, folder: Path) -> Path:
    """Check that a folder to be written holds nothing yet and lies outside of the draft."""
    if not out:
        raise CheckpointError("--out: got an empty name; expected a folder that is absent or empty. Name one.")
    try:
        path, real = Path(out).expanduser().resolve(), folder.resolve()
        held = sorted(os.listdir(path)) if path.is_dir() else []
    except (OSError, RuntimeError, ValueError) as error:
        # A name that is too long or no name at all, a folder that may not be entered, a home of nobody's.
        raise _unwritable(Path(out), error) from error
    if path == real or real in path.parents:
        raise CheckpointError(f"{out}: lies in the draft itself; expected another folder. Choose another --out.")
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{out}: is a file; expected a folder that is absent or empty. Choose another --out.")
    if held:
        raise CheckpointError(
            f"{out}: holds {', '.join(held[:3])}{' and more' * (len(held) > 3)}; expected a folder that is absent or "
            "empty. Choose another --out."
        )
    return path


@contextlib.contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """Hand out a folder that becomes ``out`` when all went well, in one step, and is gone when not."""
    stage = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    try:
        stage.mkdir(parents=True)
        yield stage
        os.rename(stage, out)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    """List all files of a folder, those in folders it links to included, relative to it.

    Raises:
        UnsupportedError: a link leads nowhere or a folder cannot be listed, so that a copy would lack something.
    """
    inside: list[Path] = []

    def enter(place: Path, above: frozenset[str]) -> None:
        real = os.path.realpath(place)
        if real in above:
            _say([f"{place}: leads back to a folder that it lies in; it was not followed"])
            return
        for path in sorted(place.iterdir()):
            if path.is_dir():
                enter(path, above | {real})
            elif path.is_file():
                inside.append(path)
            else:
                raise OSError(f"{path}, which leads nowhere" if path.is_symlink() else f"{path}, which is no file")

    try:
        enter(folder, frozenset())
    except OSError as error:
        raise UnsupportedError(
            f"{folder}: cannot be copied as a whole, got {error}; expected files and folders that can be read. Repair "
            "or remove it."
        ) from error
    return sorted(path.relative_to(folder) for path in inside)


def _copy(folder: Path, stage: Path, files: Sequence[Path]) -> None:
    """Copy files, what links lead to included."""
    with _progress(sum((folder / path).stat().st_size for path in files), "B") as advance:
        for path in files:
            (stage / path).parent.mkdir(parents=True, exist_ok=True)
            with open(folder / path, "rb") as source, open(stage / path, "xb") as copy:
                while chunk := source.read(_CHUNK):
                    copy.write(chunk)
                    advance(len(chunk))
            shutil.copystat(folder / path, stage / path)


@contextlib.contextmanager
def _progress(total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """Show a bar on a terminal where tqdm is installed; yields what advances it."""
    bar = None
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(total=total, unit=unit, unit_scale=unit == "B", leave=False)
    try:
        yield bar.update if bar is not None else lambda amount: None
    finally:
        if bar is not None:
            bar.close()
