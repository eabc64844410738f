"""``sglang-eagle3 serve``: complete SGLang's command line for a draft, check the pair, then become the server.

The user's flags are handed on untouched and in order, behind those that are added: SGLang takes the last of two.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_eagle3_ext import assembly, formats
from sglang_eagle3_ext.errors import CheckpointError, UnsupportedError, whole_number
from sglang_eagle3_ext.formats import folder
from sglang_eagle3_ext.host import config, doctor
from sglang_eagle3_ext.host.cpu import BACKEND
from sglang_eagle3_ext.host.flags import abbreviation_problems
from sglang_eagle3_ext.host.launcher import GROUPED_BACKEND, LATENT_ONLY_BACKENDS
from sglang_eagle3_ext.host.switches import read_switches
from sglang_eagle3_ext.spec import AssemblyPlan, DraftSpec, TargetFacts

_USAGE = "sglang-eagle3 serve DRAFT [TARGET] [SGLang flags] [--print]"
_PLATFORM = "eagle3_ext"

# Short enough to pay at any batch size; a tree is verified whole, so it stays small.
_STEPS, _TREE_TOKENS = 3, 8

# Each under all of its names.
_READ = (
    "--model-path --model", "--revision", "--speculative-algorithm", "--device", "--quantization", "--config",
    "--speculative-draft-model-path --speculative-draft-model", "--speculative-draft-model-revision",
    "--speculative-draft-model-quantization", "--speculative-draft-attention-backend", "--attention-backend",
    "--prefill-attention-backend", "--decode-attention-backend", "--json-model-override-args",
)  # fmt: skip
_READ_COUNTS = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
_READ_SWITCH = "--speculative-adaptive"

_TRTLLM_MLA_ON_SM100 = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "LongcatFlashForCausalLM",
        "MistralLarge3ForCausalLM",
        "PixtralForConditionalGeneration",
    }
)
"""Latent-attention targets for which SGLang takes ``trtllm_mla`` on its own on compute capability 10."""


@dataclass(frozen=True)
class Added:
    """A flag or an environment variable that the user did not write, and why it is there."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Machine:
    """What SGLang would find here: an accelerator, and whether it is of compute capability 10."""

    has_accelerator: bool
    is_sm100: bool


@dataclass(frozen=True)
class Target:
    """The target: as the command line names it, where the name came from, and what its config says."""

    name: str
    from_record: bool
    facts: TargetFacts
    config: Mapping[str, Any]
    quantisation: str | None


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``serve`` to the command line.

    Args:
        commands: the subparsers of ``sglang-eagle3``.
    """
    own = _own_flags()
    parser = commands.add_parser(
        "serve",
        parents=[own],
        usage=_USAGE,
        allow_abbrev=False,
        help="serve a draft and its target with SGLang",
        description="Check a draft and its target as `inspect` does, complete SGLang's flags, print the command and "
        "run it. Every other flag goes to SGLang as it is, and wins.",
    )
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="DRAFT [TARGET] [SGLang flags]",
        help="folders or Hub ids; without TARGET the one that the draft records",
    )
    parser.set_defaults(command=partial(_serve, parser))


def _own_flags() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(prog="sglang-eagle3 serve", usage=_USAGE, add_help=False, allow_abbrev=False)
    own.add_argument("--print", dest="only_print", action="store_true", help="print the command, start nothing")
    own.add_argument("--draft-revision", metavar="REVISION", help="branch, tag or commit of the draft on the Hub")
    own.add_argument("--target-revision", metavar="REVISION", help="the same for the target")
    return own


def _sglang_flags(problems: list[str], words: Sequence[str]) -> argparse.Namespace:
    """Read the flags of SGLang's that decide what is added; ``words`` stay as they are."""
    parser = argparse.ArgumentParser(prog="sglang-eagle3 serve", usage=_USAGE, add_help=False, allow_abbrev=False)
    for names in _READ:
        parser.add_argument(*names.split())
    for name in _READ_COUNTS:
        parser.add_argument(name, type=whole_number)
    parser.add_argument(_READ_SWITCH, action="store_true")
    flags = parser.parse_known_args(words)[0]
    if flags.config:
        words = [*_config_file_words(Path(flags.config)), *words]
        flags = parser.parse_known_args(words)[0]
    problems += abbreviation_problems(words, [*" ".join(_READ).split(), *_READ_COUNTS, _READ_SWITCH])
    if any(word.startswith("--config=") for word in words):
        problems.append(
            f"--config: got --config={flags.config}, which SGLang passes over; expected its file as a word "
            "of its own. Write a space instead of the sign."
        )
    return flags


def _config_file_words(file: Path) -> Iterator[str]:
    """Spell the entries of SGLang's ``--config`` file as the words it makes of them; they are the user's, too."""
    import yaml  # type: ignore[import-untyped,unused-ignore]

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"--config: got {error}; expected SGLang's YAML file of flags. Correct the file or its path."
        ) from error
    for key, value in content.items() if isinstance(content, dict) else ():
        if value is True:
            yield f"--{key}"
        elif isinstance(value, dict):
            yield from (f"--{key}", json.dumps(value, default=str))
        elif value is not False and not isinstance(value, list):
            yield from (f"--{key}", str(value))


def _serve(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Run ``serve``; returns only when nothing was started."""
    cut = args.words.index("--") if "--" in args.words else len(args.words)
    args, words = _own_flags().parse_known_args(args.words[:cut], args)
    if {"-h", "--help"} & set(words):
        parser.print_help()
        return 0
    named: list[str] = []
    while words and len(named) < 2 and not words[0].startswith("-"):
        named.append(os.path.expanduser(words.pop(0)))
    if not named:
        parser.error("DRAFT is missing; expected its folder or Hub id before every flag of SGLang's. Name it.")
    words += args.words[cut + 1 :]
    problems: list[str] = []
    flags = _sglang_flags(problems, words)
    problems += _flag_problems(flags)
    draft = _agreed(problems, "DRAFT", named[0], "--speculative-draft-model-path", flags.speculative_draft_model_path)
    wanted = _agreed(problems, "TARGET", named[1] if len(named) > 1 else None, "--model-path", flags.model_path)
    draft_revision = _agreed(
        problems,
        "--draft-revision",
        args.draft_revision,
        "--speculative-draft-model-revision",
        flags.speculative_draft_model_revision,
    )
    target_revision = _agreed(problems, "--target-revision", args.target_revision, "--revision", flags.revision)

    spec = _read_draft(problems, str(draft), draft_revision, flags.json_model_override_args)
    target = _read_target(problems, spec, wanted, target_revision)
    plan = assembly.plan(spec, target.facts) if spec and target else None
    findings = plan.findings if plan else assembly.findings_without_target(spec) if spec else ()
    problems += [f.message for f in findings if f.severity == "error"]
    warnings = [f"{f.code}: {f.message}" for f in findings if f.severity == "warning"]
    problems += _environment_problems(runs=not args.only_print)
    if problems or plan is None or target is None:
        _say([f"warning  {w}" for w in warnings])
        _say(f"sglang-eagle3: {line}" for problem in problems for line in problem.splitlines())
        return 1

    if not read_switches().ext:
        warnings.append(" ".join(["EAGLE3_EXT=off: stock reads the draft by its own rules.", *plan.differences]))
    variables, added = _complete(flags, str(draft), draft_revision, target, target_revision, plan)
    command = [sys.executable, "-m", "sglang.launch_server"]
    arguments = [*(word for a in added for word in (a.name, a.value)), *words]

    _say(_notes(plan, [*variables, *added], warnings))
    sys.stdout.write(_shell_text(variables, command, arguments) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    if not args.only_print:
        # Replaced, not spawned: signals and the exit code are the server's.
        os.execve(command[0], [*command, *arguments], os.environ | {v.name: v.value for v in variables})
    return 0


# ---- what the user asked for --------------------------------------------------------------------------------


def _flag_problems(flags: argparse.Namespace) -> Iterator[str]:
    """Report flags with which no EAGLE-3 draft can be served."""
    algorithm = flags.speculative_algorithm
    if algorithm is not None and algorithm.upper() != "EAGLE3":
        yield (
            f"--speculative-algorithm: got {algorithm}; expected EAGLE3, because every other algorithm feeds the draft "
            "one hidden state and skips its fc. Leave the flag out."
        )
    for name, least in (("num_steps", 1), ("eagle_topk", 1), ("num_draft_tokens", 2)):
        value = getattr(flags, f"speculative_{name}")
        if value is not None and value < least:
            yield (
                f"--speculative-{name.replace('_', '-')}: got {value}; expected at least {least}. Correct the number, "
                "or leave the flag out."
            )


def _agreed(problems: list[str], ours: str, mine: str | None, theirs: str, flag: str | None) -> str | None:
    """Take what was named in either of two ways; naming two different things is a problem."""
    if mine is not None and flag is not None and mine != flag:
        problems.append(f"{theirs}: got {flag}, and {ours} is {mine}; expected the same twice. Leave one of them out.")
    return mine if mine is not None else flag


def _read_draft(problems: list[str], draft: str, revision: str | None, override_args: str | None) -> DraftSpec | None:
    try:
        arguments = json.loads(override_args or "{}")
        if not isinstance(arguments, dict):
            raise ValueError(f"a JSON {type(arguments).__name__}")
        override = config.ext_override(arguments)
    except CheckpointError as error:
        problems.append(str(error))
        return None
    except (ValueError, RecursionError) as error:
        problems.append(f"--json-model-override-args: got {error}; expected a JSON object. Check the quotes.")
        return None
    try:
        return formats.read_draft(draft, override=override, revision=revision)
    except CheckpointError as error:
        problems.append(str(error))
        return None


def _read_target(
    problems: list[str], spec: DraftSpec | None, wanted: str | None, revision: str | None
) -> Target | None:
    """Read the target that was named, or else the one that the draft records."""
    name = wanted if wanted is not None or spec is None else spec.verifier.name
    if name is None:
        if spec is not None:
            classes = ", ".join(spec.verifier.architectures)
            recorded = f"only its class, {classes}," if classes else "none"
            problems.append(
                f"TARGET: got none, and {spec.path}/config.json records {recorded} either; expected the model that "
                "this draft was trained for. Name it: sglang-eagle3 serve DRAFT TARGET."
            )
        return None
    try:
        facts = formats.read_target(name, revision=revision)
    except CheckpointError as error:
        if wanted is None and spec is not None:
            problems.append(
                f"TARGET: got none, and {name}, which {spec.path}/config.json records, cannot be read here; expected "
                "the model that this draft was trained for. Name it: sglang-eagle3 serve DRAFT TARGET."
            )
        problems.append(str(error))
        return None
    declared = _flat(config.peek(name, revision))
    root = folder.locate(name, revision, weights=False)
    return Target(name, wanted is None, facts, declared, _quantised_by(root, declared))


def _flat(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Lay the language model's keys of a multimodal config over the wrapper's."""
    inner = (declared.get(key) for key in ("text_config", "llm_config", "language_config"))
    return dict(declared) | next((part for part in inner if isinstance(part, dict)), {})


def _quantised_by(root: Path, declared: Mapping[str, Any]) -> str | None:
    """Say where a checkpoint declares that it is quantised, in the places where SGLang looks."""
    for key in ("quantization_config", "compression_config"):
        value = declared.get(key)
        if isinstance(value, dict):
            method = value.get("quant_method") or value.get("quant_algo")
            return f"config.json:{key}" + f": {method}" * bool(method)
    files = ("hf_quant_config.json", "quant_model_description.json")
    return next((name for name in files if (root / name).is_file()), None)


def _environment_problems(*, runs: bool) -> Iterator[str]:
    """Report what keeps SGLang from starting, or from finding this package, so that stock would serve the draft."""
    if runs and find_spec("sglang") is None:
        yield (
            f"sglang: is not installed for {sys.executable}; expected it beside this package. "
            'Install it: pip install "sglang-eagle3-ext[host]".'
        )
    filters = doctor.filters()
    if filters.status == "FAIL":
        yield f"environment: {filters.text}"
    try:
        read_switches()
    except UnsupportedError as error:
        yield str(error)


def find_machine() -> Machine:
    """Ask PyTorch what SGLang would find here."""
    try:
        import torch
    except ImportError:
        return Machine(False, False)
    if torch.cuda.is_available():
        return Machine(True, torch.version.hip is None and torch.cuda.get_device_capability()[0] == 10)
    accelerator = getattr(torch, "accelerator", None)
    return Machine(accelerator is not None and accelerator.is_available(), False)


# ---- what is added ------------------------------------------------------------------------------------------


def _complete(
    flags: argparse.Namespace,
    draft: str,
    draft_revision: str | None,
    target: Target,
    target_revision: str | None,
    plan: AssemblyPlan,
) -> tuple[list[Added], list[Added]]:
    """List what the user's words lack: environment variables, and flags without those that he gave."""
    machine = find_machine()
    variables, on_cpu = _cpu_platform(flags, machine)
    wanted = [
        Added("--model-path", target.name, "the target" + ", which the draft records" * target.from_record),
        Added("--revision", target_revision or "", "its revision"),
        Added("--speculative-algorithm", "EAGLE3", "every other algorithm skips fc"),
        Added("--speculative-draft-model-path", draft, "the draft"),
        Added("--speculative-draft-model-revision", draft_revision or "", "its revision"),
        *_speculation(flags),
        *_quantisation(flags, target),
        *(on_cpu or _draft_attention(flags, plan, target, machine)),
    ]
    given = {name for name, value in vars(flags).items() if value not in (None, False)}
    added = [a for a in wanted if a.value and a.name.removeprefix("--").replace("-", "_") not in given]
    return variables, added


def _speculation(flags: argparse.Namespace) -> Iterator[Added]:
    """Complete steps, width and number of draft tokens so that they agree; SGLang takes all three or none."""
    if flags.speculative_adaptive:  # SGLang then takes all three from its own candidates
        return
    steps, topk, tokens = flags.speculative_num_steps, flags.speculative_eagle_topk, flags.speculative_num_draft_tokens
    width = topk or 1
    if width == 1:
        depth = steps or (tokens - 1 if tokens else _STEPS)
        size, shape = depth + 1, "one token a step, and the target's own"
    else:
        depth = steps or max(_STEPS, 1 - (1 + width - (tokens or 0)) // width**2)
        size, shape = min(max(_TREE_TOKENS, depth + 1), _tree_size(depth, width)), "the best of the tree"
    yield Added(
        "--speculative-num-steps", str(depth), "what the draft tokens need" if tokens else "draft steps a round"
    )
    yield Added("--speculative-eagle-topk", "1", "a chain; more would draft a tree")
    yield Added("--speculative-num-draft-tokens", str(size), shape)


def _tree_size(steps: int, topk: int) -> int:
    """Count the nodes SGLang drafts, its root included: topk children once, then topk of each of topk."""
    return 1 + topk + (steps - 1) * topk**2


def _quantisation(flags: argparse.Namespace, target: Target) -> Iterator[Added]:
    """Keep the target's quantisation away from the draft, whose tensors are plain floating numbers."""
    name = "--speculative-draft-model-quantization"
    if flags.quantization not in (None, "unquant"):
        yield Added(
            name, "unquant", f"SGLang would apply --quantization {flags.quantization} to the unquantised draft, too"
        )
    elif flags.quantization is None and target.quantisation is not None:
        yield Added(name, "unquant", f"the target is quantised ({target.quantisation}), the draft is not")


def _draft_attention(
    flags: argparse.Namespace, plan: AssemblyPlan, target: Target, machine: Machine
) -> Iterator[Added]:
    """Give the draft a backend of its own where it would inherit one that cannot compute its attention."""
    if plan.spec.attention.kind == "mla":
        return
    named = [flags.attention_backend, flags.prefill_attention_backend, flags.decode_attention_backend]
    backends = [name for name in named if name is not None] or [_default_backend(target, machine)]
    latent = next((name for name in backends if name in LATENT_ONLY_BACKENDS), None)
    if latent is not None:
        yield Added(
            "--speculative-draft-attention-backend",
            GROUPED_BACKEND,
            f"the target runs on {latent}, which cannot compute the draft's grouped attention",
        )


def _default_backend(target: Target, machine: Machine) -> str | None:
    """Name the backend that SGLang 0.5.23 takes for a target, where it is one for latent attention only."""
    if not machine.has_accelerator:
        return None
    if target.facts.architecture == "DeepseekV4ForCausalLM":
        return "dsv4"
    if target.config.get("kv_lora_rank") is None:
        return None
    if target.config.get("index_topk") is not None:
        return "dsa"
    return "trtllm_mla" if machine.is_sm100 and target.facts.architecture in _TRTLLM_MLA_ON_SM100 else None


def _cpu_platform(flags: argparse.Namespace, machine: Machine) -> tuple[list[Added], list[Added]]:
    """Choose this package's CPU platform where nothing else can serve, or where a CPU was asked for.

    Returns:
        (environment variables, flags).
    """
    asked = os.environ.get("SGLANG_PLATFORM") == _PLATFORM or (flags.device or "").split(":")[0] == "cpu"
    missing = not machine.has_accelerator and flags.device is None
    # That variable asks for SGLang's own CPU path, which has its compiled kernels.
    if not (asked or missing) or os.environ.get("SGLANG_USE_CPU_ENGINE", "0").lower() not in ("", "0", "false"):
        return [], []
    variables = [
        Added("SGLANG_PLATFORM", _PLATFORM, f"{'a CPU was asked for' if asked else 'no GPU here'}: plain PyTorch")
    ]
    if machine.has_accelerator:
        variables.append(Added("CUDA_VISIBLE_DEVICES", "", "the CPU platform refuses to start where a GPU is in sight"))
    on_cpu = [Added("--device", "cpu", "as the platform serves")]
    if flags.prefill_attention_backend is None and flags.decode_attention_backend is None:
        on_cpu.append(Added("--attention-backend", BACKEND, "the one backend of the CPU platform"))
    return variables, on_cpu


# ---- what is said -------------------------------------------------------------------------------------------


def _say(lines: Iterable[str]) -> None:
    """Write notes to stderr; stdout holds the command and nothing else."""
    for line in lines:
        sys.stderr.write(line + "\n")


def _notes(plan: AssemblyPlan, added: Sequence[Added], warnings: Sequence[str]) -> Iterator[str]:
    """Say what is served, what is doubtful about it, and why each word was added."""
    words = " | ".join(assembly.spell(b, plan.target.num_layers) for b in plan.boundaries)
    yield f"{plan.spec.path} on {plan.target.path}"
    yield f"{'fc <-' if plan.spec.fc_in else 'reads'} {words}  ({plan.origins.get('boundaries', 'default')})"
    yield from (f"warning  {w}" for w in warnings)
    yield "added:"
    texts = [
        f"{a.name}{' ' if a.name.startswith('--') else '='}{shlex.quote(a.value) if a.value else ''}" for a in added
    ]
    # A long path must not push every reason out of sight.
    width = max((len(text) for text in texts if len(text) <= 50), default=0)
    yield from (f"  {text:<{width}}  {a.reason}" for text, a in zip(texts, added, strict=True))


def _shell_text(variables: Sequence[Added], command: Sequence[str], arguments: Sequence[str]) -> str:
    """Spell the command for a shell, one flag a line."""
    lines = [
        " ".join([*(f"{v.name}={shlex.quote(v.value) if v.value else ''}" for v in variables), shlex.join(command)])
    ]
    for word in arguments:
        if word.startswith("-") or len(lines) == 1:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n    ".join(lines)
