"""The command ``sglang-eagle3 probe``; what computes is imported when it runs, so that the command line is quick."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_eagle3_ext.errors import CheckpointError, first_line, whole_number
from sglang_eagle3_ext.formats.folder import locate

if TYPE_CHECKING:
    import torch

    from sglang_eagle3_ext.probe.features import Engine
    from sglang_eagle3_ext.probe.search import Candidates
    from sglang_eagle3_ext.probe.verdict import Probe


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], engine: Engine) -> None:
    """Add ``probe`` to the command line; ``--write`` goes through the ``configure`` beside it.

    Args:
        commands: the subparsers of ``sglang-eagle3``.
        engine: lets SGLang write, for ``--sglang``.
    """
    parser = commands.add_parser(
        "probe",
        help="find out from evidence which assembly a draft was trained with",
        description="Let the target write, and find out which of its hidden states, in which order and through which "
        "norms, make the draft propose what it wrote. Exit code 0 when the declared assembly is right, 1 otherwise.",
    )
    parser.add_argument("draft", metavar="DRAFT", help="folder or Hub id of the draft")
    parser.add_argument("--target", required=True, help="folder or Hub id of the target")
    parser.add_argument("--revision", help="branch, tag or commit of the draft on the Hub")
    parser.add_argument("--target-revision", metavar="REVISION", help="the same for the target")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompts", type=Path, metavar="FILE", help="JSON list of prompts, or an object of such lists")
    text.add_argument("--features", type=Path, metavar="FILE", help="states that were captured before; no target runs")
    parser.add_argument(
        "--tokens", type=_positive, metavar="N", help="answer tokens in all, by taking fewer prompts (default: all)"
    )
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=64, metavar="N", help="longest answer (default: %(default)s)"
    )
    parser.add_argument("--steps", type=_positive, default=3, help="drafts of a chain (default: %(default)s)")
    parser.add_argument(
        "--device", default="cpu", help="where transformers runs the target and lays its states (default: %(default)s)"
    )
    parser.add_argument("--seed", type=whole_number, default=0, help="of the random starts (default: %(default)s)")
    parser.add_argument("--save-features", type=Path, metavar="FILE", help="keep the states for --features")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw acceptance against boundary for each fc block")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--write", action="store_true", help="configure the draft with what was found and measured")
    parser.add_argument(
        "--sglang",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="run the target in SGLang itself instead of transformers; all that follows goes to SGLang, such as "
        "--tp-size 8 --quantization fp8",
    )
    parser.set_defaults(command=lambda args: _probe(args, commands, engine))


def _positive(text: str) -> int:
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}; expected at least 1. Give another number.")
    return value


def _probe(
    args: argparse.Namespace, commands: argparse._SubParsersAction[argparse.ArgumentParser], engine: Engine
) -> int:
    from sglang_eagle3_ext.formats import read_draft
    from sglang_eagle3_ext.probe import report
    from sglang_eagle3_ext.probe.features import Features
    from sglang_eagle3_ext.probe.search import Candidates
    from sglang_eagle3_ext.probe.verdict import check_pair, probe

    _check_arguments(args)
    draft = locate(args.draft, args.revision)
    target = locate(args.target, args.target_revision)
    if args.write:
        commands.choices["configure"].get_default("refuse_in_place")(args.draft, draft / "config.json")
    # Before hours are spent on the text: can this pair be probed at all?
    check_pair(read_draft(draft), target)
    candidates = Candidates(draft, target)
    with contextlib.ExitStack() as stack:
        file = args.features or args.save_features
        if file is None:
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-eagle3-"))
            file = Path(place) / "features.safetensors"
        if args.features is None:
            _write_features(args, candidates, target, file, engine)
        features = Features.open(file)
        check_pair(candidates.spec, target, features)
        if args.features is not None:
            longest = max(len(answer.tokens) for answer in features.answers)
            _say(_search_lines(candidates, features.num_layers, len(features.answers), longest))
        if features.target and Path(features.target).name != Path(args.target).name:
            _say(
                [
                    f"{file}: got states of {features.target} for --target {args.target}; expected those of the same "
                    "target, and compared sizes only. Check that they are one model."
                ]
            )
        if features.steps < args.steps:
            _say(
                [
                    f"{file}: got {features.steps} tokens past each answer; expected --steps {args.steps}, since the "
                    "last verify step of each answer may count too little else. Capture anew, or give fewer --steps."
                ]
            )
        result = probe(
            draft,
            target,
            features,
            steps=args.steps,
            seed=args.seed,
            with_curves=args.plot is not None,
            progress=stack.enter_context(_bars()),
            name=args.draft,
            revision=args.revision,
            candidates=candidates,
        )
        if args.json:
            sys.stdout.write(json.dumps(_without_nan(report.as_json(result)), indent=2) + "\n")
        else:
            sys.stdout.writelines(f"{line}\n" for line in report.as_text(result))
    if args.write:
        _configure(args, result, commands)
    if args.plot is not None:
        report.picture(result, args.plot)
    return 0 if result.verdict == "declared_right" else 1


def _check_arguments(args: argparse.Namespace) -> None:
    problems = []
    if args.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            problems.append("--plot: matplotlib is not installed; expected it. Install it: pip install matplotlib.")
        else:
            from matplotlib.backend_bases import FigureCanvasBase

            kinds = FigureCanvasBase.get_supported_filetypes()
            if not args.plot.suffix:
                # As matplotlib would, behind the back of the checks below.
                args.plot = args.plot.with_name(f"{args.plot.name}.png")
            if args.plot.suffix[1:].lower() not in kinds:
                problems.append(
                    f"{args.plot}: got a picture of kind {args.plot.suffix}; expected one of "
                    f"{', '.join(sorted(kinds))}. Choose another --plot."
                )
        if os.path.lexists(args.plot):
            problems.append(f"{args.plot}: is there already; expected a free name. Choose another --plot.")
    if args.save_features is not None and os.path.lexists(args.save_features):
        problems.append(f"{args.save_features}: is there already; expected a free name. Choose another one.")
    if args.features is not None and args.save_features is not None:
        problems.append("--save-features: got it with --features; expected one of them. Copy the file instead.")
    if args.features is not None and args.sglang is not None:
        problems.append("--sglang: got it with --features, which are written already; expected one of them. Drop one.")
    if args.features is None and args.sglang is None:
        problems += _device_problems(args.device)
    if args.features is None and args.steps > args.max_new_tokens:
        problems.append(
            f"--steps: got {args.steps}; expected at most {args.max_new_tokens}, the tokens of an answer. Give fewer, "
            "or more --max-new-tokens."
        )
    if args.features is not None and args.tokens is not None:
        problems.append("--tokens: got it with --features, which are written already; expected one of them. Drop one.")
    for name in ("plot", "save_features"):
        value = getattr(args, name)
        if value is not None and not value.absolute().parent.is_dir():
            problems.append(f"{value}: its folder is not there; expected one. Make it.")
        elif value is not None and not os.access(value.absolute().parent, os.W_OK):
            problems.append(f"{value}: its folder cannot be written to; expected one that can. Choose another one.")
    if problems:
        raise CheckpointError("\n".join(problems))


def _device_problems(device: str) -> list[str]:
    """Try whether the target can run there and its states come back; PyTorch has no question for it."""
    import torch

    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        reason = first_line(error)
        return [
            f"--device: got {device}, which PyTorch cannot compute on: {reason}; expected cpu, cuda or the like. "
            "Name one."
        ]
    return []


def _write_features(args: argparse.Namespace, candidates: Candidates, target: Path, file: Path, engine: Engine) -> None:
    """Run the target; say before what that takes."""
    from sglang_eagle3_ext.probe.features import FeatureWriter, capture, encode, load_target, read_prompts

    prompts = read_prompts(args.prompts)
    if args.tokens is not None:
        prompts = prompts[: max(1, args.tokens // args.max_new_tokens)]
    ids = encode(prompts, target)
    largest = max((max(prompt) for prompt in ids), default=0)
    if largest >= candidates.spec.vocab.target:
        raise CheckpointError(
            f"{args.prompts}: got token {largest}; expected ids below the target's {candidates.spec.vocab.target}. "
            "Write prompts as text, or with this target's tokenizer."
        )
    groups = [prompt.group for prompt in prompts]
    if args.sglang is not None:
        _let_sglang_write(args, candidates, target, ids, groups, file, engine)
        return
    model = load_target(target, args.device)
    _announce(model, candidates, ids, args.max_new_tokens + args.steps, file)
    with (
        _bars() as bars,
        FeatureWriter(file, target=str(args.target), steps=args.steps) as writer,
    ):
        capture(
            model,
            ids,
            groups,
            writer,
            max_new_tokens=args.max_new_tokens,
            steps=args.steps,
            progress=bars("text", len(prompts) * args.max_new_tokens),
        )


def _let_sglang_write(
    args: argparse.Namespace,
    candidates: Candidates,
    target: Path,
    ids: Sequence[Sequence[int]],
    groups: Sequence[str | None],
    file: Path,
    engine: Engine,
) -> None:
    """Run the target in SGLang; the time is said once it is up, since only it knows how fast it is."""
    from sglang_eagle3_ext.formats import read_target
    from sglang_eagle3_ext.probe.features import FeatureWriter, capture_elsewhere, state_bytes

    flags = args.sglang[args.sglang[:1] == ["--"] :]
    facts = read_target(target)
    dtype = _dtype(target, flags)
    new = args.max_new_tokens + args.steps
    row = state_bytes(facts.num_layers, facts.hidden_size, dtype)
    _announce_sizes(candidates, facts.num_layers, [len(prompt) + new for prompt in ids], row, file)
    _say(["target: SGLang takes its own share of memory, see --mem-fraction-static; starting it"])
    with (
        _bars() as bars,
        FeatureWriter(file, target=str(args.target), steps=args.steps) as writer,
    ):
        capture_elsewhere(
            engine,
            facts,
            ids,
            groups,
            writer,
            max_new_tokens=args.max_new_tokens,
            steps=args.steps,
            dtype=dtype,
            flags=flags,
            say=lambda line: _say([line]),
            progress=bars("text", len(ids)),
        )


def _dtype(target: Path, flags: Sequence[str]) -> torch.dtype:
    """Say in which dtype SGLang is to compute: as its flags say, else as the target is stored."""
    import torch

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", default="auto")
    named = parser.parse_known_args(flags)[0].dtype
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    inner = config.get("text_config") or {}
    if named == "auto":
        stored = (part.get(key) for part in (inner, config) for key in ("dtype", "torch_dtype"))
        named = next((value for value in stored if value), "bfloat16")
    dtypes = {
        "float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16,
        "float16": torch.float16, "half": torch.float16,
    }  # fmt: skip
    if named not in dtypes:
        raise CheckpointError(
            f"--dtype: got {named}; expected one of {', '.join(dtypes)}. Give one of them behind --sglang."
        )
    return dtypes[named]


def _announce(model: Any, candidates: Candidates, ids: Sequence[Sequence[int]], new: int, file: Path) -> None:
    """Say what it is going to take to run the target in transformers."""
    import torch

    from sglang_eagle3_ext.probe.features import batches, common_start, row_bytes

    layers = model.config.get_text_config().num_hidden_layers
    _announce_sizes(candidates, layers, [len(prompt) + new for prompt in ids], row_bytes(model), file)
    cut = list(batches(sorted(range(len(ids)), key=lambda i: len(ids[i])), ids, model, new))
    feed = torch.ones(len(cut[0]), 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        for _ in range(2):  # the first one is slow
            began = time.perf_counter()
            model(input_ids=feed, use_cache=False)
    texts = [[ids[i] for i in some] for some in cut]
    columns = sum(max(map(len, some)) - common_start(some) + new for some in texts)
    minutes = (time.perf_counter() - began) * columns / 60
    weights = sum(p.nbytes for p in model.parameters())
    # Its states with their padding, the answers cut out of them, keys and values (up to twice as many), and copies.
    batch = 5 * max(len(some) * (max(map(len, some)) + new) for some in texts) * row_bytes(model)
    _say(
        [
            f"target: {weights / 1e9:.1f} GB of memory, and up to {batch / 1e9:.1f} GB for a batch; about "
            f"{minutes:.1f} min to write the text"
        ]
    )


def _announce_sizes(candidates: Candidates, layers: int, lengths: Sequence[int], row: int, file: Path) -> None:
    """Say how much there is to write, to keep and to search, and refuse where the disk has no room for it."""
    size = sum(lengths) * row
    room = shutil.disk_usage(file.absolute().parent).free
    if size > room:
        raise CheckpointError(
            f"{file}: the states need up to {size / 1e9:.1f} GB, got {room / 1e9:.1f} GB free; expected room for "
            "them. Take less text with --tokens, or another place with --save-features or TMPDIR."
        )
    _say(
        [
            f"{len(lengths)} prompts, up to {sum(lengths):,} tokens with their answers",
            f"disk: up to {size / 1e9:.1f} GB in {file.parent}",
            *_search_lines(candidates, layers, len(lengths), max(lengths, default=1)),
        ]
    )


def _search_lines(candidates: Candidates, layers: int, prompts: int, longest: int) -> list[str]:
    """Say what the search is going to take.

    Args:
        candidates: the drafts.
        layers: n.
        prompts: how many there are.
        longest: tokens of the longest one and its answer.
    """
    from sglang_eagle3_ext.probe.search import PROJECTION_BYTES, STAGES, search_bound, seconds_per_answer, sizes

    spec = candidates.spec
    bound = search_bound(layers, max(1, spec.num_sources), sizes(min(STAGES[-1], max(1, prompts // 2))))
    minutes = bound * seconds_per_answer(candidates, max(longest, 4)) / 60
    # Tables of the target stay mapped as they are stored, but for the rows of its head that the draft proposes.
    draft = sum(tensor.nbytes for tensor in candidates.tensors.values())
    draft += 4 * spec.vocab.draft * spec.hidden_size * (spec.lm_head != "own")
    return [
        f"search: the draft reads at most {bound:,} answers, in about {minutes:.1f} min; usually less than a tenth",
        f"memory: {draft / 1e9:.1f} GB for the draft and up to {PROJECTION_BYTES / 1e9:.1f} GB for projections",
    ]


def _configure(
    args: argparse.Namespace, result: Probe, commands: argparse._SubParsersAction[argparse.ArgumentParser]
) -> None:
    """Write what was found, and what it is expected to reach, through ``configure``."""
    from sglang_eagle3_ext.probe.verdict import sources

    if result.verdict == "none_explains":
        _say(
            [
                f"{args.draft}: nothing was written, got no assembly that explains it; expected one. Check that "
                f"{args.target} is the target it was trained for."
            ]
        )
        return
    chosen = result.best
    if result.verdict == "declared_right" and result.declared is not None:
        chosen = result.declared
    total = chosen.total
    expected = {
        "accept_length": round(total.accept_length, 4),
        "accept_per_position": [round(share, 4) for share in total.accept_per_position],
        "steps": result.steps,
        "topk": 1,
        "draft_tokens": result.steps + 1,
        "verify_steps": total.verify_steps,
    }
    sets = {
        "sources": ",".join(sources(chosen.places, result.target.num_layers)),
        "order": "as_listed",
        "expected": json.dumps(expected),
        **{key: json.dumps(value) if isinstance(value, float) else value for key, value in chosen.switches},
    }
    argv = [args.draft, "--target", args.target]
    for flag, value in (("--revision", args.revision), ("--target-revision", args.target_revision)):
        argv += [flag, value] if value is not None else []
    for key, value in sets.items():
        argv += ["--set", f"{key}={value}"]
    configured = commands.choices["configure"].parse_args(argv)
    # What configure prints would spoil the JSON on stdout.
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        configured.command(configured)


def _without_nan(value: Any) -> Any:
    """Put null where JSON has no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return [_without_nan(inner) for inner in value] if isinstance(value, list) else value


def _say(lines: Iterable[str]) -> None:
    """Write remarks to stderr, which leaves stdout to the result."""
    sys.stderr.writelines(f"{line}\n" for line in lines)
    sys.stderr.flush()


_AT_MOST = "at most "
"""Before a total that a stage seldom reaches."""

_LINES_S = 15.0
"""Seconds between two lines of progress where there is no terminal for a bar."""


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[str, int], Callable[[int], object]]]:
    """Show a bar for each stage on a terminal where tqdm is installed, else a line now and then."""
    bar: Any = None

    def start(what: str, total: int) -> Callable[[int], object]:
        nonlocal bar
        if bar is not None:
            bar.close()
        bar = None
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                bar = tqdm(total=total, desc=what, leave=False)
                return bar.update  # type: ignore[no-any-return]
        began = said = time.monotonic()
        done = 0

        def advance(more: int) -> None:
            nonlocal done, said
            done += more
            now = time.monotonic()
            if now - said >= _LINES_S:
                said = now
                _say([f"{what}: {done:,} of {_AT_MOST * (what == 'search')}{total:,}, {now - began:.0f} s"])

        return advance

    try:
        yield start
    finally:
        if bar is not None:
            bar.close()
