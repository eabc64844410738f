"""The command ``sglang-eagle3``."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglang_eagle3_ext import __version__, assembly, formats, probe, resave
from sglang_eagle3_ext.errors import CheckpointError, UnsupportedError, first_line
from sglang_eagle3_ext.spec import AssemblyPlan, Attention, DraftSpec, Finding, Source, TargetFacts, printable

if TYPE_CHECKING:
    from collections.abc import Callable

INSPECT_KEYS = (
    "format",
    "architecture",
    "sources",
    "boundaries",
    "order",
    "sources_from",
    "num_sources",
    "target_hidden_size",
    "hidden_size",
    "fc_in",
    "norms",
    "attention",
    "rope",
    "vocab",
    "embed",
    "lm_head",
    "origins",
    "findings",
    "unconsumed_tensors",
    "missing_tensors",
    "stock",
)
"""The keys of ``inspect --json``; stable, and described in docs/inspect.schema.json."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    from sglang_eagle3_ext.host.servers import signals_as_exit

    # A shell may close them (``>&-``); what is printed then goes nowhere.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open as long as the process lives)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The name of a file need not be text, and is written as it is where the terminal takes any text.
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        # Whatever ends the process, a copy that is half written goes with it.
        with signals_as_exit():
            code = command(args)
        sys.stdout.flush()
        return code
    except (CheckpointError, UnsupportedError) as error:
        lines = "\n".join(map(printable, str(error).split("\n")))
        print(f"sglang-eagle3: {lines}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # The reader of a pipe has gone or a disk is full; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        place = error.filename or "a file or the output"
        print(
            f"sglang-eagle3: {place}: got {error.strerror or first_line(error)}; expected a place that can be read and "
            "written and has room. Check its rights and the disk.",
            file=sys.stderr,
        )
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-eagle3", description="Serve any EAGLE-3 draft in SGLang exactly as it was trained."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser(
        "inspect",
        help="say how a draft is going to be served, and what is wrong with it",
        description="Say how a draft is going to be served and where every value comes from. "
        "Exit code 0 when it can be served, 1 when not.",
    )
    inspect.add_argument("draft", metavar="DRAFT", help="folder or Hub id of the draft")
    inspect.add_argument("--target", help="folder or Hub id of the target; resolves layers to boundaries")
    inspect.add_argument(
        "--override",
        type=_override,
        metavar="JSON",
        help="an eagle3_ext object, merged over the draft's own as --json-model-override-args would",
    )
    resave.add_revisions(inspect)
    inspect.add_argument("--weights", action="store_true", help="look at every value, too")
    output = inspect.add_mutually_exclusive_group()
    output.add_argument("--trace", action="store_true", help="print the forward pass with its shapes")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    inspect.set_defaults(command=_inspect)

    doctor = commands.add_parser(
        "doctor",
        help="say whether this environment is fit",
        description="Say whether this environment is fit to serve. Exit code 1 when a check fails.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    doctor.set_defaults(command=_doctor)

    from sglang_eagle3_ext.host import bench, features, serve

    serve.add_command(commands)
    bench.add_command(commands)
    resave.add_command(commands)
    probe.add_command(commands, features.write_states)
    return parser


def _override(text: str) -> Mapping[str, Any]:
    """Read ``--override``: an ``eagle3_ext`` object, alone or under its key as the server takes it."""
    try:
        value = json.loads(text)
        # Half of a surrogate pair is JSON and no text.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f'got {error}; expected JSON such as \'{{"sources": ["embed"]}}\'. Check the quotes.'
        ) from error
    if isinstance(value, dict) and set(value) == {"eagle3_ext"}:
        value = value["eagle3_ext"]
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {value!r}; expected a JSON object. Write one.")
    return value


def _doctor(args: argparse.Namespace) -> int:
    from sglang_eagle3_ext.host import doctor

    return doctor.run(args.json)


def _inspect(args: argparse.Namespace) -> int:
    spec: DraftSpec | None = None
    plan: AssemblyPlan | None = None
    target: TargetFacts | None = None
    unread: list[Finding] = []
    draft_error: CheckpointError | None = None
    try:
        spec = formats.read_draft(
            args.draft, override=args.override, override_place="--override", revision=args.revision
        )
    except CheckpointError as error:
        draft_error = error
        unread += error.findings
    try:
        target = None if args.target is None else formats.read_target(args.target, revision=args.target_revision)
    except CheckpointError as error:
        unread += error.findings
    if draft_error is not None:
        unread += assembly.findings_of_remains(draft_error, target)
        if args.weights and draft_error.spec is not None:
            unread += formats.check_values(draft_error.spec, progress=_progress)
    findings: tuple[Finding, ...] = tuple(unread)
    if spec is not None and target is not None:
        plan = assembly.plan(spec, target)
        findings = plan.findings
    elif spec is not None:
        known = assembly.findings_without_target(spec)
        if args.target is not None:  # which may have said what stock's default is
            known = tuple(f for f in known if f.code != "no_sources_declared")
        findings = (*known, *unread)
    if args.weights and spec is not None:
        findings += formats.check_values(
            spec, args.target if plan else None, target_revision=args.target_revision, progress=_progress
        )
    if unread and not args.json:
        raise CheckpointError.from_findings(findings)
    if args.json:
        print(json.dumps(_as_json(spec, plan, findings), indent=2, allow_nan=False))
    elif spec is not None:
        print("\n".join(map(printable, _as_text(spec, plan, findings))))
        if args.trace:
            print("\n" + "\n".join(map(printable, _trace(spec, plan))))
    return 1 if any(f.severity == "error" for f in findings) else 0


def _progress(names: Iterable[str]) -> Iterable[str]:
    """Show a bar on a terminal where tqdm is installed."""
    if not sys.stderr.isatty():
        return names
    try:
        from tqdm import tqdm
    except ImportError:
        return names
    bar: Iterable[str] = tqdm(names, desc="values", unit="tensor", leave=False)
    return bar


def _texts(spec: DraftSpec, plan: AssemblyPlan | None) -> list[str] | None:
    """Spell the sources in fc column order; plain ids by what they turned out to mean."""
    if plan is not None:
        if spec.sources is not None and all(s.kind != "id" for s in spec.sources):
            return [s.text for s in assembly.column_order(spec.sources, spec.order)]
        return ["final_norm" if b == "final_norm" else f"layer{b - 1}" if b else "embed" for b in plan.boundaries]
    if spec.sources is None:
        return None
    return [_spell_id(s, spec) for s in assembly.column_order(spec.sources, spec.order)]


def _spell_id(source: Source, spec: DraftSpec) -> str:
    """Spell a source without a target; a plain id whose meaning hangs on the target stays an id."""
    if source.kind != "id" or source.index is None or spec.layer_ids == "stock":
        return source.text
    boundary = source.index + (spec.layer_ids == "output")
    return "embed" if boundary == 0 else f"layer{boundary - 1}"


def _as_json(spec: DraftSpec | None, plan: AssemblyPlan | None, findings: Iterable[Finding]) -> dict[str, Any]:
    """Build the object of ``inspect --json``; unknown values are null."""
    result: dict[str, Any] = dict.fromkeys(INSPECT_KEYS)
    result["findings"] = [{"severity": f.severity, "code": f.code, "message": f.message} for f in findings]
    if spec is None:
        return result
    a = spec.attention
    boundaries = plan.boundaries if plan else ()
    if any(b != "final_norm" and b < 0 for b in boundaries):  # no such state: one of the findings
        boundaries = ()
    return result | {
        "format": spec.format,
        "architecture": spec.architecture,
        "sources": _texts(spec, plan) or None,
        "boundaries": list(boundaries) or None,
        "order": spec.order,
        "sources_from": spec.origins.get("sources"),
        "num_sources": spec.num_sources,
        "target_hidden_size": spec.target_hidden_size,
        "hidden_size": spec.hidden_size,
        "fc_in": spec.fc_in,
        "norms": {
            "fc_norm": spec.norms.around_fc == "per_source",
            "norm_before_fc": spec.norms.around_fc == "concatenation",
            "residual": spec.norms.residual,
            "recurrent_state": spec.norms.recurrent_state,
            "final_norm": spec.norms.final_norm,
        },
        "attention": {
            "kind": a.kind,
            "num_layers": a.num_layers,
            "heads": a.heads,
            "kv_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "qk_norm": a.qk_norm,
            "qkv_bias": a.qkv_bias,
            "sliding_window": a.sliding_window,
            "latent": a.latent and asdict(a.latent),
        },
        "rope": {
            "theta": spec.rope.theta,
            "scaling": spec.rope.scaling and dict(spec.rope.scaling),
            "interleaved": spec.rope.interleaved,
        },
        "vocab": {"target": spec.vocab.target, "draft": spec.vocab.draft, "map": spec.vocab.map},
        "embed": spec.embed,
        "lm_head": spec.lm_head,
        "origins": dict(plan.origins if plan else spec.origins),
        "unconsumed_tensors": list(spec.unconsumed),
        "missing_tensors": list(spec.missing),
        "stock": {
            "starts": plan.stock_starts if plan else None if spec.stock.loads else False,
            "serves_same": plan.equals_stock if plan else None,
            "boundaries": list(plan.stock_boundaries) if plan and plan.stock_boundaries else None,
            "ids": list(plan.stock_ids) if plan and plan.stock_ids else None,
            "differences": list(plan.differences if plan else spec.stock.differences),
        },
    }


def _rows(spec: DraftSpec, plan: AssemblyPlan | None) -> Iterator[tuple[str, str, str | None]]:
    """List what there is to say about a draft: a name, the value, the field whose origin is shown."""
    a, norms, vocab = spec.attention, spec.norms, spec.vocab
    texts = _texts(spec, plan)
    if plan is not None:
        words = [assembly.spell(b, plan.target.num_layers) for b in plan.boundaries]
        yield ("fc <-" if spec.fc_in else "reads"), " | ".join(words), "sources"
        yield "boundaries", ", ".join(map(str, plan.boundaries)), None
        yield from ((label, text, None) for label, text in assembly.spell_ids(plan))
    else:
        yield (
            ("fc <-" if spec.fc_in else "reads"),
            " | ".join(texts) if texts else "unknown without --target",
            "sources",
        )
    yield "order", spec.order.replace("_", " "), "order"
    if spec.fc_in is not None:
        yield (
            "fc",
            f"{spec.num_sources} x {spec.target_hidden_size} = {spec.fc_in} -> {spec.hidden_size}",
            "num_sources",
        )
    yield "norms around fc", norms.around_fc.replace("_", " "), "norms"
    yield "residual", norms.residual.replace("_", "-"), "residual"
    yield "recurrent state", norms.recurrent_state.replace("_", "-"), "recurrent_state"
    yield "final norm", "yes" if norms.final_norm else "no", "final_norm"
    extras = [name for name, on in (("q/k norm", a.qk_norm), ("q/k/v bias", a.qkv_bias), ("o bias", a.o_bias)) if on]
    if a.sliding_window:
        extras.append(f"window {a.sliding_window}")
    yield "layers", f"{a.num_layers} {a.kind}" + "".join(f", {e}" for e in extras), "num_layers"
    if a.latent is None:
        yield "heads", f"{a.heads} of {a.head_dim}, {a.kv_heads} kv", "heads"
    else:
        size = a.latent
        parts = f"{size.qk_nope_head_dim} + {size.qk_rope_head_dim} rotated, values of {size.v_head_dim}"
        yield "heads", f"{a.heads} of {parts}", "heads"
        yield "query latent", "none" if size.q_lora_rank is None else str(size.q_lora_rank), "q_lora_rank"
        yield "key/value latent", str(size.kv_lora_rank), "kv_lora_rank"
        yield "rotated together", "neighbours" if spec.rope.interleaved else "halves", "rope_interleave"
    yield "rope theta", f"{spec.rope.theta:g}", "rope_theta"
    scaling = spec.rope.scaling
    yield "rope scaling", json.dumps(dict(scaling)) if scaling else "none", "rope_scaling"
    yield "vocabulary", f"{vocab.draft} of {vocab.target}, map {vocab.map}", "vocab_map"
    yield "embedding", spec.embed, "embed"
    yield "head", spec.lm_head, "lm_head"
    if spec.producer:
        yield "producer", spec.producer, "producer"
    if spec.verifier.name:
        yield "trained for", spec.verifier.name, None


def _as_text(spec: DraftSpec, plan: AssemblyPlan | None, findings: Sequence[Finding]) -> Iterator[str]:
    """Lay out a draft for reading."""
    origins = plan.origins if plan else spec.origins
    yield f"{spec.path}"
    yield f"{spec.format} layout, {spec.architecture}" + (f", on {plan.target.path}" if plan else "")
    yield ""
    rows = [(name, value, origins.get(field, "") if field else "") for name, value, field in _rows(spec, plan)]
    names = max(len(name) for name, _, _ in rows)
    values = max((len(value) for _, value, origin in rows if origin), default=0)
    for name, value, origin in rows:
        yield f"  {name:<{names}}  {value:<{values}}  {origin}".rstrip()
    if plan is not None:
        yield ""
        if plan.equals_stock:
            yield "stock SGLang serves this draft the same way"
        else:
            yield (
                "stock SGLang would serve another draft:"
                if plan.stock_starts
                else "stock SGLang cannot serve this draft:"
            )
            yield from (f"  {difference}" for difference in plan.differences)
    if findings:
        yield ""
        for finding in findings:
            yield f"{finding.severity:<8} {finding.code}"
            yield f"         {finding.message}"
    errors = sum(f.severity == "error" for f in findings)
    yield ""
    yield f"cannot be served: {errors} error{'s' * (errors > 1)}" if errors else "can be served"


def _trace(spec: DraftSpec, plan: AssemblyPlan | None) -> Iterator[str]:
    """Walk through the draft's forward pass, each step with its symbolic and its numeric shape."""
    sizes = {
        "L": spec.num_sources,
        "M": spec.target_hidden_size,
        "E": spec.hidden_size,
        "HQ": spec.attention.heads,
        "HKV": spec.attention.kv_heads,
        "D": spec.attention.head_dim,
        "I": spec.intermediate_size,
        "V": spec.vocab.draft,
    }
    if (size := spec.attention.latent) is not None:
        sizes |= {
            "CQ": size.q_lora_rank or 0,
            "C": size.kv_lora_rank,
            "N": size.qk_nope_head_dim,
            "R": size.qk_rope_head_dim,
            "DV": size.v_head_dim,
        }
    yield "feature pass (T rows; docs/notation.md has the letters)"
    steps = list(_steps(spec, plan))
    names = max(len(name) for name, _ in steps)
    shapes = max(len(shape) for _, shape in steps)
    for name, shape in steps:
        yield f"  {name:<{names}}  {shape:<{shapes}}  {_numeric(shape, sizes)}".rstrip()
    state = "after" if spec.norms.recurrent_state == "post_norm" else "before"
    yield f"recurrent pass: the same from the state {state} the final norm; fc does not run"


def _numeric(shape: str, sizes: Mapping[str, int]) -> str:
    """Put numbers into a shape such as ``[T, L*M]``."""
    axes = []
    for axis in shape.strip("[]").split(", ") if shape else ():
        product, symbolic = 1, []
        for factor in axis.split("*"):
            if factor.isdigit() or factor in sizes:
                product *= int(factor) if factor.isdigit() else sizes[factor]
            else:
                symbolic.append(factor)
        axes.append("*".join([*symbolic, *([str(product)] if product != 1 or not symbolic else [])]))
    return f"[{', '.join(axes)}]" if axes else ""


def _steps(spec: DraftSpec, plan: AssemblyPlan | None) -> Iterator[tuple[str, str]]:
    """List the steps of a feature pass with their symbolic shapes."""
    norms, attention = spec.norms, spec.attention
    if spec.fc_in is None:
        yield "final norm of the target", "[T, M]"
    else:
        words = (
            [assembly.spell(b, plan.target.num_layers) for b in plan.boundaries]
            if plan
            else _texts(spec, plan) or [f"source {i}" for i in range(spec.num_sources)]
        )
        for word in words:
            norm = " -> fc_norm" if norms.around_fc == "per_source" else ""
            yield f"{word}{norm}", "[T, M]"
        yield "concatenate" + (" -> input_norm" if norms.around_fc == "concatenation" else ""), "[T, L*M]"
        yield "fc" + (" + bias" if spec.fc_bias else ""), "[T, E]"
    for i in range(attention.num_layers):
        prefix = f"layer {i}: " if attention.num_layers > 1 else ""
        if i == 0:
            yield f"{prefix}{spec.embed} embedding -> input_layernorm", "[T, E]"
            kept = "after" if norms.residual == "post_norm" else "before"
            yield f"{prefix}state -> hidden_norm (residual: {kept} it)", "[T, E]"
            yield f"{prefix}concatenate", "[T, 2*E]"
        else:
            yield f"{prefix}input_layernorm", "[T, E]"
        for name, shape in _attention_steps(attention):
            yield f"{prefix}{name}", shape
        yield f"{prefix}o_proj + residual", "[T, E]"
        yield f"{prefix}post_attention_layernorm -> gate, up", "[T, I]"
        yield f"{prefix}down + residual", "[T, E]"
    yield ("final norm" if norms.final_norm else "no final norm"), "[T, E]"
    yield f"head ({spec.lm_head})", "[T, V]"
    how = {"offset": "draft id + d2t[draft id]", "absolute": "d2t[draft id]", "none": "draft id"}[spec.vocab.map]
    yield f"target id = {how}", ""


def _attention_steps(attention: Attention) -> Iterator[tuple[str, str]]:
    """List the steps of one layer's attention."""
    latent = attention.latent
    if latent is None:
        qk = " -> q/k norm" if attention.qk_norm else ""
        yield f"q_proj{qk} -> rope", "[T, HQ*D]"
        yield f"k_proj{qk} -> rope, v_proj", "[T, HKV*D]"
        yield "attention", "[T, HQ*D]"
        return
    if latent.q_lora_rank is not None:
        yield "q_a_proj -> q_a_layernorm", "[T, CQ]"
    yield f"{'q_proj' if latent.q_lora_rank is None else 'q_b_proj'} -> rope on R of D", "[T, HQ*D]"
    yield "kv_a_proj_with_mqa: latent -> kv_a_layernorm", "[T, C]"
    yield "kv_a_proj_with_mqa: key of all heads -> rope", "[T, R]"
    yield "kv_b_proj: keys", "[T, HQ*N]"
    yield "kv_b_proj: values", "[T, HQ*DV]"
    yield "attention", "[T, HQ*DV]"


if __name__ == "__main__":
    sys.exit(main())
