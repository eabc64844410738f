"""Compare servers on one machine: no speculation, a draft by stock's rules, the draft as it was trained.

``sglang-eagle3 bench`` and the demo run this. All servers are up at once with the same flags and take turns in
interleaved rounds (``measure``); every output is compared with that of the run without speculation, and the
target itself judges the differences (``near_ties``). What comes out is a JSON file, two tables and a picture.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_eagle3_ext import assembly, formats
from sglang_eagle3_ext.errors import whole_number
from sglang_eagle3_ext.formats import folder as checkpoint
from sglang_eagle3_ext.host import near_ties, report
from sglang_eagle3_ext.host.flags import handed_on_problems
from sglang_eagle3_ext.host.measure import Record, accept_length, measure, sum_up
from sglang_eagle3_ext.host.report import LABELS
from sglang_eagle3_ext.host.servers import Server, ServerError, running, signals_as_exit
from sglang_eagle3_ext.host.variants import other_order, resave, set_aside
from sglang_eagle3_ext.spec import AssemblyPlan

FEW_ROUNDS = 5

_OURS_TO_SET = (
    "--model-path", "--model", "--revision", "--host", "--port", "--speculative-algorithm",
    "--speculative-draft-model-path", "--speculative-draft-model", "--speculative-draft-model-revision",
    "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens",
)  # fmt: skip
_READ = ("--device", "--attention-backend", "--dtype", "--max-total-tokens", "--max-running-requests")


class BenchError(ValueError):
    """Say that a comparison cannot be run like this; holds every problem, one per line."""


@dataclass(frozen=True)
class Prompt:
    """One question, and the group it is counted in."""

    text: str
    group: str | None = None


DEFAULT_PROMPTS = tuple(
    map(
        Prompt,
        (
            "Explain in a few sentences why the sky is blue and sunsets are red.",
            "Write a Python function that merges two sorted lists, and explain how it works.",
            "Give me a shopping list and the steps for a vegetable soup for four.",
            "What is the difference between a virus and a bacterium?",
            "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
            "Translate into French and into Spanish: The train leaves at half past six, and we are late.",
            "A shop sells pens at 3 for 2 euros. How much do 21 pens cost? Show each step.",
            "List five arguments for and five against working from home.",
            "Write a polite e-mail in which I ask my landlord to repair the heating.",
            "Summarise how a bill becomes a law in a parliamentary democracy.",
            "Give an example of a JSON object that describes a book with two authors, and explain its fields.",
            "What should a beginner know before a first week of hiking in the mountains?",
        ),
    )
)
WARMUP = "Name three things that one can do on a rainy afternoon."


@dataclass(frozen=True)
class Settings:
    """What is compared, and how.

    Attributes:
        draft, target: folder or Hub id, with ``revision`` and ``target_revision`` for the latter.
        out: folder of the logs, the re-saved drafts and the figures.
        rows: which servers, by their names in ``LABELS``.
        flags: further flags of SGLang for every server.
        environment: what is set for every server.
    """

    draft: str
    target: str
    out: Path
    rows: tuple[str, ...] = tuple(LABELS)
    prompts: tuple[Prompt, ...] = DEFAULT_PROMPTS
    warmup: str = WARMUP
    rounds: int = 5
    tokens: int = 64
    concurrency: int = 1
    steps: int = 3
    topk: int = 1
    draft_tokens: int = 4
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None
    target_revision: str | None = None

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise BenchError("\n".join(problems))


def _problems(settings: Settings) -> Iterator[str]:
    """List what is wrong with the settings."""
    unknown = [name for name in settings.rows if name not in LABELS]
    if unknown or len(set(settings.rows)) < len(settings.rows) or "baseline" not in settings.rows:
        yield (
            f"--rows: got {','.join(settings.rows)}; expected baseline and any of {', '.join(list(LABELS)[1:])}, each "
            "once. Every figure is relative to the baseline. Correct the list."
        )
    for name in ("rounds", "tokens", "concurrency", "steps", "topk"):
        if (value := getattr(settings, name)) < 1:
            yield f"--{name}: got {value}; expected at least 1. Give another number."
    if settings.draft_tokens < 2:
        yield f"--draft-tokens: got {settings.draft_tokens}; expected at least 2. Give another number."
    if not settings.prompts:
        yield "--prompts: got none; expected at least one prompt. Add some."
    instead = "DRAFT, TARGET, --steps, --topk and --draft-tokens say what may be chosen"
    yield from handed_on_problems(settings.flags, "--", _OURS_TO_SET, _READ, instead)


def _missing_packages() -> Iterator[str]:
    for name, purpose in (("sglang", "to serve"), ("openai", "to ask the servers"), ("tqdm", "for progress bars")):
        if importlib.util.find_spec(name) is None:
            yield f"{name}: not installed in {sys.executable}; expected it {purpose}. Install it: pip install {name}."


def _flag_names(flags: Iterable[str]) -> list[str]:
    return [word.partition("=")[0] for word in flags if word.startswith("--")]


def _flag_value(flags: Sequence[str], name: str) -> str | None:
    """Find the value of a flag, written with a space or with ``=``; of two the last one, as SGLang does."""
    found = None
    for i, word in enumerate(flags):
        if word == name:
            found = flags[i + 1] if i + 1 < len(flags) else None
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def read_prompts(file: Path) -> tuple[Prompt, ...]:
    """Read a JSON file of prompts.

    Args:
        file: a list of strings, or an object ``{group: [strings or {"prompt": ...}]}``.

    Raises:
        BenchError: it cannot be read, or an entry is something else; names every such entry.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        # Half of a surrogate pair is JSON, and no request can carry it.
        json.dumps(content, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise BenchError(f"{file}: cannot be read, got {error}; expected a JSON file of prompts. Repair it.") from error
    groups: Mapping[str | None, Any] = content if isinstance(content, dict) else {None: content}
    prompts: list[Prompt] = []
    problems: list[str] = []
    for group, items in groups.items():
        where = f"{file}:{group}" if group is not None else str(file)
        if not isinstance(items, list):
            problems.append(
                f"{where}: got {type(items).__name__}; expected a list of prompts. Write "
                '["...", "..."] or {"group": ["...", {"prompt": "..."}]}.'
            )
            continue
        for i, item in enumerate(items):
            text = item.get("prompt") if isinstance(item, dict) else item
            if isinstance(text, str) and text.strip():
                prompts.append(Prompt(text, group))
            else:
                problems.append(
                    f'{where}[{i}]: got {json.dumps(item)[:60]}; expected text or {{"prompt": text}}. Correct it.'
                )
    if not prompts and not problems:
        problems.append(f"{file}: got no prompt; expected at least one. Add some.")
    if problems:
        raise BenchError("\n".join(problems))
    return tuple(prompts)


# ---- what is served ---------------------------------------------------------------------------------------


def make_servers(settings: Settings, plan: AssemblyPlan) -> tuple[list[Server], dict[str, str]]:
    """Describe the server of every row; re-saved drafts are written here.

    Returns:
        The servers, and the rows that are left out with the reason for each.
    """
    flags, environment = server_flags(settings)
    left_out: dict[str, str] = {}
    drafts: dict[str, Path | str] = {"stock": settings.draft, "ours": settings.draft}
    if "stock" in settings.rows and (reason := _stock_refuses(plan)):
        left_out["stock"] = reason
    if "stock_ids" in settings.rows:
        _offer_ids(settings, plan, drafts, left_out)
    permuted = [name for name in ("stock_permuted", "ours_permuted") if name in settings.rows]
    if permuted:
        _offer_permuted(settings, plan, permuted, drafts, left_out)

    command = [_shown(sys.executable), "-m", "sglang.launch_server", "--model-path", _shown(settings.target)]
    if settings.target_revision:
        command += ["--revision", settings.target_revision]
    servers = []
    for name in settings.rows:
        if name in left_out:
            continue
        words, env = [*command, *flags], dict(environment)
        if name != "baseline":
            words += _speculation(settings, drafts[name])
        if name.startswith("stock"):
            env["EAGLE3_EXT"] = "off"
        servers.append(Server(name, words, settings.out / f"{name}.log", env))
    return servers, left_out


def _speculation(settings: Settings, draft: Path | str) -> list[str]:
    words = [
        *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", str(settings.steps)),
        *("--speculative-eagle-topk", str(settings.topk)),
        *("--speculative-num-draft-tokens", str(settings.draft_tokens)),
        *("--speculative-draft-model-path", _shown(draft)),
    ]
    if settings.revision and draft == settings.draft:
        words += ["--speculative-draft-model-revision", settings.revision]
    return words


def _shown(path: Path | str) -> str:
    """Write a path below the current folder as one would type it."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else str(path)


def _stock_refuses(plan: AssemblyPlan) -> str | None:
    """Say why stock would not start with this draft at all."""
    return None if plan.stock_starts else "; ".join(plan.differences)


def _offer_ids(settings: Settings, plan: AssemblyPlan, drafts: dict[str, Path | str], left_out: dict[str, str]) -> None:
    """Re-save the draft with ids that stock reads right, where there are such ids."""
    words = [assembly.spell(b, plan.target.num_layers) for b in plan.boundaries]
    if plan.equals_stock:
        left_out["stock_ids"] = "stock reads this draft right as it lies there; see the row stock"
    elif refused := _stock_refuses(plan):
        left_out["stock_ids"] = refused
    elif plan.stock_ids is None or not plan.is_identity:
        what = "in this order" if plan.stock_ids else "at all"
        left_out["stock_ids"] = (
            f"no id list makes stock feed fc with [{' | '.join(words)}] {what} on {plan.target.architecture}"
        )
    else:
        folder = resave(plan, settings.out / "drafts" / "stock_ids", range(len(plan.boundaries)))
        told = assembly.plan(formats.read_draft(folder), plan.target)
        if told.equals_stock:
            drafts["stock_ids"] = folder
        else:
            shutil.rmtree(folder)
            left_out["stock_ids"] = "; ".join(told.differences)


def _offer_permuted(
    settings: Settings,
    plan: AssemblyPlan,
    names: Sequence[str],
    drafts: dict[str, Path | str],
    left_out: dict[str, str],
) -> None:
    """Re-save the draft with its blocks in another order; ours is told by its sources, stock by its ids."""
    order = other_order(plan)
    if order is None:
        left_out.update(dict.fromkeys(names, "a draft of one source has no other order"))
        return
    if "stock_permuted" in names:
        reason = _stock_refuses(plan)
        if reason is None and plan.stock_ids is None:
            reason = f"no id list makes stock capture these states on {plan.target.architecture}"
        if reason:
            left_out["stock_permuted"] = reason
    wanted = [name for name in names if name not in left_out]
    if wanted:
        folder = resave(plan, settings.out / "drafts" / "permuted", order)
        drafts.update(dict.fromkeys(wanted, folder))


def server_flags(settings: Settings) -> tuple[list[str], dict[str, str]]:
    """List the flags that every server gets, the given ones first, and what is set in its environment.

    Without an accelerator and without ``--device`` the servers run on this package's CPU platform. Pools are kept
    small, since several servers share one device.
    """
    flags, environment = list(settings.flags), dict(settings.environment)
    if _flag_value(flags, "--device") is None and not _has_accelerator():
        flags += ["--device", "cpu"]
    on_cpu = _flag_value(flags, "--device") == "cpu"
    if on_cpu and _flag_value(flags, "--attention-backend") is None:
        flags += ["--attention-backend", "eagle3_cpu"]
    if on_cpu and _flag_value(flags, "--attention-backend") == "eagle3_cpu":
        environment = {"SGLANG_PLATFORM": "eagle3_ext", **environment}
        if _has_accelerator():
            environment["CUDA_VISIBLE_DEVICES"] = ""  # the platform refuses to start with a GPU in sight
    longest = max(len(prompt.text.encode()) for prompt in settings.prompts) + 512 + settings.tokens
    defaults = {
        "--max-total-tokens": str(max(8192, settings.concurrency * longest)),
        "--max-running-requests": str(max(4, settings.concurrency)),
        "--skip-server-warmup": None,
    }
    if _sglang_knows("sleep_on_idle"):
        # An idle SGLang spins; several of them would measure each other.
        defaults["--sleep-on-idle"] = None
    given = _flag_names(flags)
    for name, value in defaults.items():
        if name not in given:
            flags += [name] if value is None else [name, value]
    return flags, environment


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def _sglang_knows(argument: str) -> bool:
    """Say whether the installed SGLang has a server argument, without importing it (that takes seconds)."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        return False
    root = Path(spec.origin).parent / "srt"
    files = [root / "server_args.py", *sorted(root.glob("arg_groups/**/*.py"))]
    return any(argument in file.read_text(encoding="utf-8") for file in files if file.is_file())


def served_dtype(settings: Settings) -> str:
    """Name the type the servers run in, as SGLang settles it."""
    names = {"half": "float16", "float": "float32"}
    given = (_flag_value(settings.flags, "--dtype") or "auto").lower()
    if given != "auto":
        return names.get(given, given)
    config = checkpoint.read_json(
        checkpoint.locate(settings.target, settings.target_revision, weights=False) / "config.json",
        "target_unreadable",
    )
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else {}
    stored = next((str(c[k]) for c in (config, text) for k in ("dtype", "torch_dtype") if c.get(k)), "float32")
    if names.get(stored, stored) != "float32":
        return names.get(stored, stored)
    # SGLang serves in float32 only when told to.
    return "bfloat16" if str(config.get("model_type", "")).startswith("gemma") else "float16"


# ---- where it runs ----------------------------------------------------------------------------------------


def machine_facts() -> dict[str, Any]:
    """Describe the machine, without its name."""
    import torch

    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    models = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "system": platform.system(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def busy(machine: Mapping[str, Any]) -> str | None:
    """Say so when something else keeps the machine busy."""
    if machine["load_before"] <= max(1.0, machine["cores"] / 4):
        return None
    return f"This machine is busy (load {machine['load_before']}): expect slow and noisy figures."


def versions() -> dict[str, str]:
    """Name the versions that the figures depend on."""
    found = {"python": platform.python_version()}
    for name in ("sglang", "torch", "transformers", "sglang-eagle3-ext"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def leave_out_environment(prefixes: tuple[str, ...]) -> list[str]:
    """Remove variables from this process's environment that would tilt the comparison; say which, a line each."""
    names = [name for name in os.environ if name.startswith(prefixes)]
    return [f"(leaving {name}={os.environ.pop(name)} of the environment out of the comparison)" for name in names]


# ---- the comparison ---------------------------------------------------------------------------------------


def compare(
    settings: Settings,
    machine: Mapping[str, Any],
    file: Path,
    while_up: Callable[[Sequence[Server]], None] | None = None,
) -> dict[str, Any]:
    """Run the servers, ask them, judge the differences, and write the figures.

    Args:
        settings: what is compared.
        machine: where, from :func:`machine_facts`, taken before anything else began.
        file: where the figures go; one that is there gets a backup name. It is written before the differences are
            judged, which can take more memory than there is, and again after.
        while_up: called after the last question, while the servers still run.

    Returns:
        The content of the file.

    Raises:
        CheckpointError: the draft cannot be served on this target.
        ServerError: a server died or did not answer.
    """
    plan = assembly.plan_pair(
        settings.draft, settings.target, revision=settings.revision, target_revision=settings.target_revision
    )
    dtype, sha256 = served_dtype(settings), weights_sha256(Path(plan.spec.path))
    servers, left_out = make_servers(settings, plan)
    for name, reason in left_out.items():
        _say(f"Without the row {name}: {reason}.")
    on_cpu = _flag_value(servers[0].command, "--device") == "cpu"
    with running(servers, at_once=on_cpu):
        records = measure(
            servers,
            [prompt.text for prompt in settings.prompts],
            settings.rounds,
            settings.tokens,
            settings.warmup,
            settings.concurrency,
        )
        if while_up is not None:
            while_up(servers)

    rows = [sum_up(name, record, records["baseline"], settings.steps) for name, record in records.items()]
    threads = {**os.environ, **settings.environment}.get("OMP_NUM_THREADS", "")
    result: dict[str, Any] = {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        "machine": dict(machine),
        "versions": versions(),
        "settings": {
            "draft": _shown(settings.draft),
            "draft_sha256": sha256,
            "target": _shown(settings.target),
            "questions": len(settings.prompts),
            "rounds": settings.rounds,
            "max_tokens": settings.tokens,
            "concurrency": settings.concurrency,
            "dtype": dtype,
            "threads": int(threads) if threads.isdigit() else None,
            "speculation": {
                "steps": settings.steps,
                "topk": settings.topk,
                "draft_tokens": settings.draft_tokens,
            },
            "flags": list(servers[0].command[5:]),
        },
        "left_out": left_out,
        "runs": [asdict(row) for row in rows],
        "ratios": ratios({row.name: row.tok_s_rounds for row in rows}),
        "groups": groups(records, settings.prompts),
        "differences": [],
    }
    set_aside(file)
    _save(result, file)
    differences = _judge(settings, dtype, near_ties.find_disagreements(records))
    result["runs"] = [asdict(replace(row, near_ties=count_near_ties(differences, row.name))) for row in rows]
    result["differences"] = [{**asdict(item), "near_tie": item.is_near_tie} for item in differences]
    _save(result, file)
    return result


def weights_sha256(folder: Path) -> str:
    """Hash the weights of a checkpoint, file after file in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        with file.open("rb") as stream:
            for block in iter(partial(stream.read, 1 << 20), b""):
                digest.update(block)
    return digest.hexdigest()


def _judge(
    settings: Settings, dtype: str, disagreements: Sequence[near_ties.Disagreement]
) -> list[near_ties.Difference]:
    try:
        return near_ties.judge(settings.target, disagreements, dtype, revision=settings.target_revision)
    except (ImportError, OSError, RuntimeError, ValueError, MemoryError) as error:
        _say(
            f"{settings.target}: cannot be run by transformers, got {type(error).__name__}: {error}; expected it to "
            f"judge {len(disagreements)} differences, which all count as failures now. Compare with -- --dtype float32."
        )
        return [item.weigh() for item in disagreements]


def _save(result: Mapping[str, Any], file: Path) -> None:
    """Write a JSON file whole or not at all."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def ratios(rounds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Divide every row's speeds by the baseline's: the medians, and round by round.

    Args:
        rounds: row -> tok/s of each round.
    """
    base = rounds["baseline"]
    found = {}
    for name, speeds in rounds.items():
        by_round = [speed / other for speed, other in zip(speeds, base, strict=True)]
        found[name] = {
            "of_medians": statistics.median(speeds) / statistics.median(base),
            "median": statistics.median(by_round),
            "min": min(by_round),
            "max": max(by_round),
            "rounds": by_round,
        }
    return found


def groups(records: Mapping[str, Record], prompts: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
    """Compute the accept lengths of every group of prompts; empty without groups."""
    found: dict[str, dict[str, Any]] = {}
    for group in dict.fromkeys(prompt.group for prompt in prompts):
        if group is None:
            continue
        members = {i for i, prompt in enumerate(prompts) if prompt.group == group}
        found[group] = {
            "prompts": len(members),
            "spec_accept_length": {
                name: accept_length([answer for answer in record.answers if answer.question in members])
                for name, record in records.items()
            },
        }
    return found


def count_near_ties(differences: Sequence[near_ties.Difference], name: str) -> int | None:
    """Count the questions at which one server differed and only by near-ties; ``None`` for the baseline."""
    if name == "baseline":
        return None
    mine = [item for item in differences if item.name == name]
    return len({d.question for d in mine} - {d.question for d in mine if not d.is_near_tie})


# ---- the command ------------------------------------------------------------------------------------------


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` to the commands of ``sglang-eagle3``."""
    parser = commands.add_parser(
        "bench",
        help="measure a draft against no speculation and against stock",
        description="Serve a target without speculation, with its draft by stock's rules and with the draft as it was "
        "trained, all at once; ask all of them the same questions in turns. Exit code 1 when an output differs from "
        "the one without speculation and is no near-tie.",
        usage="%(prog)s DRAFT TARGET [options] [-- further flags of SGLang for every server]",
    )
    parser.add_argument("draft", metavar="DRAFT", help="folder or Hub id of the draft")
    parser.add_argument("target", metavar="TARGET", help="folder or Hub id of the target")
    parser.add_argument("--revision", help="branch, tag or commit of the draft on the Hub")
    parser.add_argument("--target-revision", metavar="REVISION", help="the same for the target")
    parser.add_argument(
        "--rows",
        default=",".join(LABELS),
        metavar="NAMES",
        help="which servers (default %(default)s); a row that stock cannot serve is left out with the reason",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSON: a list of strings, or {group: [strings or {"prompt": ...}]} (default: a dozen built in)',
    )
    parser.add_argument(
        "--rounds", type=whole_number, default=5, help="how often to ask each prompt (default %(default)s)"
    )
    parser.add_argument("--tokens", type=whole_number, default=64, help="longest answer (default %(default)s)")
    parser.add_argument("--concurrency", type=whole_number, default=1, help="requests at a time (default %(default)s)")
    parser.add_argument("--steps", type=whole_number, default=3, help="draft steps (default %(default)s)")
    parser.add_argument(
        "--topk", type=whole_number, default=1, help="branches for each draft step (default %(default)s)"
    )
    parser.add_argument("--draft-tokens", type=whole_number, help="tokens for each verify step (default: steps + 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("eagle3-bench"), metavar="DIR", help="folder of results (default %(default)s)"
    )
    parse = parser.parse_known_args

    # argparse has no way to say "options, then -- and words that are none of mine".
    def up_to_dashes(args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        found, rest = parse(words[:end], namespace)
        found.flags = words[end + 1 :]
        return found, rest

    parser.parse_known_args = up_to_dashes  # type: ignore[method-assign]
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Run ``sglang-eagle3 bench``.

    Returns:
        0, or 1 when something failed or an output differs and is no near-tie.
    """
    try:
        with signals_as_exit():
            return _run(args)
    except (BenchError, ServerError) as error:
        for line in str(error).splitlines() if isinstance(error, BenchError) else [str(error)]:
            sys.stderr.write(f"sglang-eagle3: {line}\n")
        return 1


def read_settings(args: argparse.Namespace) -> Settings:
    """Turn the command line into settings.

    Raises:
        BenchError: something in them is wrong; names everything.
    """
    problems = list(_missing_packages())
    prompts = DEFAULT_PROMPTS
    if args.prompts is not None:
        try:
            prompts = read_prompts(args.prompts)
        except BenchError as error:
            problems.append(str(error))
    try:
        settings = Settings(
            draft=args.draft,
            target=args.target,
            out=args.out,
            rows=tuple(args.rows.split(",")),
            prompts=prompts,
            rounds=args.rounds,
            tokens=args.tokens,
            concurrency=args.concurrency,
            steps=args.steps,
            topk=args.topk,
            draft_tokens=args.steps + 1 if args.draft_tokens is None else args.draft_tokens,
            flags=tuple(args.flags),
            revision=args.revision,
            target_revision=args.target_revision,
        )
    except BenchError as error:
        problems.append(str(error))
    if problems:
        raise BenchError("\n".join(problems))
    return settings


def _run(args: argparse.Namespace) -> int:
    settings = read_settings(args)
    for line in leave_out_environment(("EAGLE3_EXT", "SGLANG_PLATFORM", "SGLANG_PLUGINS")):
        _say(line)
    machine = machine_facts()
    if warning := busy(machine):
        _say(warning)
    if settings.rounds < FEW_ROUNDS:
        _say(f"{settings.rounds} rounds are few: below {FEW_ROUNDS} the spread says little.")
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(
            f"--out: got {settings.out}, which cannot be made ({error.strerror}); expected a folder to write into. "
            "Choose another."
        ) from error
    _say(f"Target {settings.target}, draft {settings.draft}, logs {settings.out}/*.log")
    file = settings.out / "bench.json"
    result = compare(settings, machine, file)

    at_a_time = "one request" if settings.concurrency == 1 else f"{settings.concurrency} requests"
    _say(f"\n{len(settings.prompts)} prompts, {settings.rounds} rounds, {at_a_time} at a time:\n")
    _say(report.text_table(report.HEADER, report.cells(result)))
    _say(f"\n{report.text_table(report.detail_header(result), report.detail_cells(result))}")
    for item in result["differences"]:
        _say(f"  {report.describe(item, result['settings']['dtype'])}")
    drawn = report.picture(result, file.with_suffix(".png"))
    if command := recording(result):
        _say(f"\nFor the watch to compare with this while serving: {command}")
    _say(f"\nAll figures: {file}" + (" and bench.png beside it" if drawn else ""))
    if not drawn:
        _say("(No picture: matplotlib is not installed. Install it: pip install matplotlib.)")
    failures = [item for item in result["differences"] if not item["near_tie"]]
    for item in failures:
        sys.stderr.write(f"FAILED: {report.describe(item, result['settings']['dtype'])}\n")
    return int(bool(failures))


def recording(result: Mapping[str, Any]) -> str | None:
    """Write the command that puts the measured acceptance into the draft, as ``eagle3_ext.expected``.

    Args:
        result: what ``compare`` returned.

    Returns:
        The command; ``None`` where the draft was not served as trained, or nothing was verified.
    """
    measured = next((run for run in result["runs"] if run["name"] == "ours" and run["spec_accept_length"]), None)
    if measured is None:
        return None
    shares = [round(share, 4) for share in measured["spec_accept_rate_per_position"]]
    expected = {"accept_length": round(measured["spec_accept_length"], 4), "accept_per_position": shares}
    # Every round asks the same and is answered alike: it is no further text.
    steps = {"verify_steps": max(1, measured["verify_steps"] // result["settings"]["rounds"])}
    words = ["sglang-eagle3", "configure", result["settings"]["draft"]]
    words += ["--set", f"expected={json.dumps(expected | result['settings']['speculation'] | steps)}"]
    if not Path(result["settings"]["draft"]).expanduser().is_dir():
        words += ["--out", "DIR"]
    return shlex.join(words)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
