"""Measure what docs/probe.md says of ``sglang-eagle3 probe`` on the demo's pair.

    python -m benchmarks.probe.measure default          # the command at its default size, told nothing; minutes,
                                                        # on a quiet machine
    python -m benchmarks.probe.measure picture          # docs/probe.png, by the command with --plot, and its memory
    python -m benchmarks.probe.measure told             # what the copy of a draft says, and what is found
    python -m benchmarks.probe.measure served NAME...   # one server for each assembly, and what the probe predicts
    python -m benchmarks.probe.measure pairs            # drafts trained on tiny targets of other families
    python -m benchmarks.probe.measure drift            # the right assembly, one category of texts after another

``default`` to ``served`` take states that were kept (``sglang-eagle3 probe --save-features FILE``, or
``default --save-features FILE``) with ``--features FILE`` in place of letting the target write anew. Each step keeps
its part of ``benchmarks/results/probe.json``; ``python -m benchmarks.probe.render`` writes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.demo.target import ROOT, make_target
from benchmarks.probe.render import RESULT
from benchmarks.stamp import DRAFT, demo_draft, stamp
from sglang_eagle3_ext.formats import read_target
from sglang_eagle3_ext.host.servers import Server, progress, running
from sglang_eagle3_ext.probe import report
from sglang_eagle3_ext.probe.features import Features, FeatureWriter, capture, encode, load_target, read_prompts
from sglang_eagle3_ext.probe.search import Candidates
from sglang_eagle3_ext.probe.verdict import interval, measure, probe

PICTURE = ROOT / "docs" / "probe.png"
NEW, STEPS = 64, 3
TOLD_PROMPTS = 192
SERVED_PROMPTS = 48
DRIFTING = (ROOT / "benchmarks" / "watch" / "prompts.json", ROOT / "benchmarks" / "demo" / "prompts_eval.json")
DRIFTING_NEW = 160

RIGHT = ["embed", "layer3", "layer15"]
SERVED: dict[str, dict[str, Any]] = {
    "right": {"sources": RIGHT},
    "one layer later": {"sources": ["layer0", "layer4", "layer16"]},
    "stock's default": {"sources": ["layer1", "layer14", "layer26"]},
    "columns in another order": {"sources": ["layer3", "embed", "layer15"]},
    "residual": {"sources": RIGHT, "residual": "post_norm"},
    "recurrent state": {"sources": RIGHT, "recurrent_state": "post_norm"},
}
"""What the servers are told, as ``eagle3_ext``."""


def keep(part: str, value: Any) -> None:
    """Put one part of the result into its file."""
    kept: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.is_file() else {"schema": 1}
    kept[part] = kept.get(part, {}) | value if part == "served" else value
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")


def copy_draft(folder: Path, config: Mapping[str, Any], change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Copy the demo's draft with other config keys (``None`` drops one) and changed tensors."""
    folder.mkdir()
    merged = json.loads((DRAFT / "config.json").read_text()) | dict(config)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))
    tensors = load_file(DRAFT / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def as_it_is(tensors: dict[str, torch.Tensor]) -> None:
    """Change nothing."""


def permute(tensors: dict[str, torch.Tensor]) -> None:
    """Put the blocks of fc into the order layer15, embed, layer3."""
    blocks = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([blocks[i] for i in (2, 0, 1)], dim=1)


def make_absolute(tensors: dict[str, torch.Tensor]) -> None:
    """Let d2t hold target ids."""
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def draw(tensors: dict[str, torch.Tensor]) -> None:
    """Draw every matrix anew, each as large as it was."""
    g = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dim() == 2:
            noise = torch.randn(tensor.shape, generator=g) * tensor.float().std()
            tensors[name] = noise.to(tensor.dtype)


VLLM_IDS = {"eagle_aux_hidden_state_layer_ids": [0, 4, 16], "use_aux_hidden_state": True}

TOLD: tuple[tuple[str, dict[str, Any], Callable[[dict[str, torch.Tensor]], None]], ...] = (
    ("nothing (no `eagle3_ext`, no ids)", {"eagle3_ext": None}, as_it_is),
    ("the truth", {}, as_it_is),
    ("every source one layer later", {"eagle3_ext": {"sources": ["layer0", "layer4", "layer16"]}}, as_it_is),
    ("the truth, but its `fc` blocks are permuted", {}, permute),
    ("`residual: post_norm`", {"eagle3_ext": {"sources": RIGHT, "residual": "post_norm"}}, as_it_is),
    ("`recurrent_state: post_norm`", {"eagle3_ext": {"sources": RIGHT, "recurrent_state": "post_norm"}}, as_it_is),
    ("nothing about `d2t`, which holds absolute ids", {}, make_absolute),
    ("ids as vLLM counts them, which stock reads otherwise", {"eagle3_ext": None, "eagle_config": VLLM_IDS}, as_it_is),
    ("`rope_theta: 10000` (trained: 100000)", {"rope_theta": 10000.0}, as_it_is),
    ("`rope_theta: 1000000`", {"rope_theta": 1000000.0}, as_it_is),
    ("the truth, with random weights", {}, draw),
)
OTHER_TARGET = "the truth, on a target whose residual stream has its axes permuted"


def some_features(kept: Path | None, file: Path, prompts: int, target: Path) -> Features:
    """Let the target answer the first prompts, or take its answers to them from what was kept."""
    some = read_prompts()[:prompts]
    ids = encode(some, target)
    if kept is not None:
        features = Features.open(kept)
        wanted = {tuple(i) for i in ids}
        answers = [a for a in features.answers if tuple(a.tokens[: a.prompt_length].tolist()) in wanted]
        return replace(features, answers=tuple(answers))
    with FeatureWriter(file, target=target.name, steps=STEPS) as writer, progress(prompts * NEW, "text") as bar:
        capture(
            load_target(target),
            ids,
            [prompt.group for prompt in some],
            writer,
            max_new_tokens=NEW,
            steps=STEPS,
            progress=bar.update,
        )
    return Features.open(file)


def run_default(target: Path, folder: Path, kept: Path | None, save: Path | None, threads: int) -> None:
    """Run the command as a user does, on a copy that says nothing, and keep what it took."""
    copy = copy_draft(folder / "draft", {"eagle3_ext": None}, as_it_is)
    stamped = stamp() | {"draft_sha256": demo_draft()}
    flags = [] if save is None else ["--save-features", str(save)]
    began = time.perf_counter()
    said, _ = run_command(copy, target, kept, *flags, threads=threads)
    result = json.loads(said)
    wall = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    for key in ("draft", "target"):
        result[key] = Path(result[key]).name
    result["advice"] = result["advice"].replace(str(copy), "DRAFT")
    taken = {"wall_s": round(wall, 1), "cpu_s": round(used.ru_utime + used.ru_stime, 1)}
    taken |= {"max_rss_mb": used.ru_maxrss >> 10}
    keep("default", {**stamped, **taken, "threads": threads, "text_included": kept is None, "result": result})


def run_command(draft: Path, target: Path, kept: Path | None, *flags: str, threads: int) -> tuple[str, int]:
    """Run the command, and return what it prints, and the most memory it had beside mapped files, in MB.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", "sglang_eagle3_ext.cli", "probe", str(draft), "--target", str(target), "--json"]
    command += [*(["--features", str(kept)] if kept is not None else []), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    most = 0
    with tempfile.TemporaryFile("w+") as said:
        running_command = subprocess.Popen(command, stdout=said, env=environment)
        while (code := running_command.poll()) is None:
            most = max(most, anonymous_mb(running_command.pid))
            time.sleep(0.2)
        said.seek(0)
        printed = said.read()
    # 1 says that something else than what is declared was found.
    if code not in (0, 1) or not printed:
        raise RuntimeError(f"probe: got exit code {code}; expected 0 or 1 and a result. See what it said.")
    return printed, most


def anonymous_mb(pid: int) -> int:
    """Return the memory of a process that is no page of a file, in MB; 0 where it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) >> 10 if found else 0


def draw_picture(target: Path, folder: Path, kept: Path | None, threads: int) -> None:
    """Let the command draw the picture of the documentation, and keep the memory it took where states were kept."""
    copy = copy_draft(folder / "draft", {"eagle3_ext": None}, as_it_is)
    stamped = stamp() | {"draft_sha256": demo_draft()}
    _, most = run_command(copy, target, kept, "--plot", str(folder / "probe.png"), threads=threads)
    shutil.copyfile(folder / "probe.png", PICTURE)
    if kept is not None:
        keep("memory", {**stamped, "features_mb": kept.stat().st_size >> 20, "anonymous_mb": most})


def run_told(target: Path, folder: Path, kept: Path | None) -> None:
    """Probe copies that say different things of themselves on the same texts."""
    features = some_features(kept, folder / "features", TOLD_PROMPTS, target)
    stamped = stamp() | {"draft_sha256": demo_draft()}
    rows = []
    for i, (name, config, change) in enumerate(TOLD):
        rows.append(told_row(name, copy_draft(folder / str(i), config, change), target, features))
    other, turned = turn_target(target, features, folder)
    rows.append(told_row(OTHER_TARGET, DRAFT, other, turned))
    keep("told", {**stamped, "prompts": TOLD_PROMPTS, "max_new_tokens": NEW, "rows": rows})


def told_row(name: str, draft: Path, target: Path, features: Features) -> dict[str, Any]:
    """Probe one copy."""
    got = report.as_json(probe(draft, target, features, steps=STEPS))
    sys.stderr.write(f"{name}: {got['verdict']}, {got['best']['sources']} {got['best']['switches']}\n")
    return {
        "says": name,
        "verdict": got["verdict"],
        "sources": got["best"]["sources"],
        "switches": got["best"]["switches"],
        "declared": got["declared"] and round(got["declared"]["accept_length"], 4),
        "best": round(got["best"]["accept_length"], 4),
        "gain": got["gain"] and [round(x, 4) for x in (got["gain"]["accept_length"], *got["gain"]["ci95"])],
        "alike": got["alike"],
        "undecided": got["undecided"],
    }


def turn_target(target: Path, features: Features, folder: Path) -> tuple[Path, Features]:
    """Permute the axes of the residual stream, and of the embedding with them: another target, as good as this one."""
    g = torch.Generator().manual_seed(0)
    axes = torch.randperm(features.answers[0].states.shape[-1], generator=g)
    other = folder / "target"
    other.mkdir()
    shutil.copyfile(target / "config.json", other / "config.json")
    embed = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    save_file({"model.embed_tokens.weight": embed[:, axes].contiguous()}, other / "model.safetensors")
    with FeatureWriter(folder / "turned", target=target.name, steps=STEPS) as writer:
        for answer in features.answers:
            writer.append(replace(answer, states=answer.states[..., axes]))
    return other, Features.open(folder / "turned")


def run_served(target: Path, folder: Path, kept: Path | None, names: Sequence[str]) -> None:
    """Serve each assembly, ask it what the probe reads, and compare."""
    features = some_features(kept, folder / "features", SERVED_PROMPTS, target)
    candidates = Candidates(DRAFT, target)
    n = read_target(target).num_layers
    groups = [answer.group for answer in features.answers]
    asked = {tuple(answer.tokens[: answer.prompt_length].tolist()) for answer in features.answers}
    others = [] if kept is None else Features.open(kept).answers
    others = [answer for answer in others if tuple(answer.tokens[: answer.prompt_length].tolist()) not in asked]
    # Recorded on other texts than those that are served where ``--features`` has some; else `right` cannot be reported.
    right = measure(candidates, others or features.answers, (0, 4, 16), (), steps=STEPS).total
    expected = {
        "accept_length": right.accept_length,
        "accept_per_position": list(right.accept_per_position),
        "steps": STEPS,
        "topk": 1,
        "draft_tokens": STEPS + 1,
        "verify_steps": right.verify_steps,
    }
    for name in names:
        told = SERVED[name]
        switches = tuple((key, value) for key, value in told.items() if key != "sources")
        places = tuple(0 if s == "embed" else int(s.removeprefix("layer")) + 1 for s in told["sources"])
        predicted = measure(candidates, features.answers, places, switches, steps=STEPS)
        stamped = stamp() | {"draft_sha256": demo_draft()}
        served = ask_server(target, folder, features, {**told, "expected": expected})
        error = predicted.total.accept_length / served["accept_length"] - 1
        sys.stderr.write(f"{name}: predicted {predicted.total.accept_length:.4f}, served {served}\n")
        keep(
            "served",
            {
                name: {
                    **stamped,
                    "eagle3_ext": told,
                    "num_layers": n,
                    "prompts": len(features.answers),
                    "max_new_tokens": NEW,
                    "predicted": {
                        "accept_length": predicted.total.accept_length,
                        "ci95": list(interval(predicted, groups)),
                        "accept_per_position": list(predicted.total.accept_per_position),
                        "verify_steps": predicted.total.verify_steps,
                    },
                    "served": served,
                    "error": error,
                    "recorded": expected["accept_per_position"],
                }
            },
        )


def run_pairs(folder: Path) -> None:
    """Run the tests that train tiny pairs, and keep what they found.

    Raises:
        RuntimeError: a test failed.
    """
    file, stamped = folder / "pairs.json", stamp()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "soak or e2e", "tests/test_probe/test_soak.py"]
    environment = os.environ | {"PAIRS_RESULTS": str(file)}
    if code := subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
        raise RuntimeError(f"pairs: got exit code {code}; expected every pair as its test wants it. See above.")
    keep("pairs", {**stamped, "pairs": json.loads(file.read_text())})


def draft_server(target: Path, log: Path, ext: Mapping[str, Any]) -> Server:
    """Describe a server of the demo's draft under an ``eagle3_ext``."""
    words = ["--model-path", str(target), "--device", "cpu", "--attention-backend", "eagle3_cpu", "--dtype", "float32"]
    words += ["--max-total-tokens", "8192", "--max-running-requests", "16", "--skip-server-warmup", "--sleep-on-idle"]
    words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(DRAFT)]
    words += ["--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1"]
    words += ["--speculative-num-draft-tokens", str(STEPS + 1)]
    words += ["--json-model-override-args", json.dumps({"eagle3_ext": ext})]
    environment = {"SGLANG_PLATFORM": "eagle3_ext", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return Server("served", [sys.executable, "-m", "sglang.launch_server", *words], log, environment)


def ask(server: Server, tokens: int, ids: list[int]) -> dict[str, Any]:
    """Ask for one greedy answer."""
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}}
    request = urllib.request.Request(
        f"{server.url}/generate", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=1800) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def warned_after(log: Path) -> int | None:
    """Return the verify steps on which a server's warning rested, ``None`` where it gave none."""
    found = re.search(r"got [\d.]+ over (\d+) verify steps.*sglang-eagle3 probe", log.read_text(errors="replace"))
    return int(found[1]) if found else None


def ask_server(target: Path, folder: Path, features: Features, ext: Mapping[str, Any]) -> dict[str, Any]:
    """Run one server on the demo's draft under an ``eagle3_ext``, ask for every answer, and read its counters."""
    log = folder / "server.log"
    server = draft_server(target, log, ext)
    prompts = [answer.tokens[: answer.prompt_length].tolist() for answer in features.answers]
    with running([server]), ThreadPoolExecutor(16) as pool, progress(len(prompts), "answers") as bar:
        answers = []
        for got in pool.map(partial(ask, server, NEW), prompts):
            answers.append(got)
            bar.update()
    verify = sum(a["meta_info"]["spec_verify_ct"] for a in answers)
    completion = sum(a["meta_info"]["completion_tokens"] for a in answers)
    histogram = [a["meta_info"]["spec_correct_drafts_histogram"] for a in answers]
    reached = [sum(sum(h[i:]) for h in histogram) for i in range(STEPS + 1)]
    texts = [a.tokens[a.prompt_length :][: a.completion_tokens].tolist() for a in features.answers]
    same = sum(a["output_ids"] == text for a, text in zip(answers, texts, strict=True))
    return {
        "accept_length": completion / verify,
        "accept_per_position": [count / reached[0] for count in reached[1:]],
        "verify_steps": verify,
        "completion_tokens": completion,
        "same_text": same / len(answers),
        "watch_rested_on": warned_after(log),
    }


def run_drift(target: Path, folder: Path) -> None:
    """Serve the right assembly what the probe recorded of it, on one category of texts after another."""
    best = json.loads(RESULT.read_text())["default"]["result"]["best"]
    chain = {"steps": STEPS, "topk": 1, "draft_tokens": STEPS + 1}
    expected = {key: best[key] for key in ("accept_length", "accept_per_position", "verify_steps")} | chain
    stamped = stamp() | {"draft_sha256": demo_draft()}
    prompts = [prompt for file in DRIFTING for prompt in read_prompts(file)]
    categories = list(dict.fromkeys(prompt.group for prompt in prompts))
    log = folder / "server.log"
    server = draft_server(target, log, {"sources": RIGHT, "expected": expected})
    lengths: dict[str, float] = {}
    steps = 0
    with running([server]), ThreadPoolExecutor(6) as pool, progress(len(prompts), "answers") as bar:
        for category in categories:
            texts = encode([prompt for prompt in prompts if prompt.group == category], target)
            counts = []
            for got in pool.map(partial(ask, server, DRIFTING_NEW), texts):
                counts.append((got["meta_info"]["completion_tokens"], got["meta_info"]["spec_verify_ct"]))
                bar.update()
            tokens, verified = map(sum, zip(*counts, strict=True))
            lengths[str(category)], steps = tokens / verified, steps + verified
    found = {"verify_steps": steps, "accept_length": lengths, "watch_rested_on": warned_after(log)}
    sys.stderr.write(f"drift: {found}\n")
    keep("drift", {**stamped, "expected": expected, "prompts": len(prompts), "max_new_tokens": DRIFTING_NEW, **found})


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    default = steps.add_parser("default")
    picture = steps.add_parser("picture")
    told = steps.add_parser("told")
    served = steps.add_parser("served")
    steps.add_parser("pairs")
    steps.add_parser("drift")
    served.add_argument("names", nargs="*", metavar="NAME", help=f"among {', '.join(SERVED)}; default: all")
    for step in (default, picture, told, served):
        step.add_argument("--features", type=Path, metavar="FILE")
    default.add_argument("--save-features", type=Path, metavar="FILE")
    for step in (default, picture):
        step.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.step == "pairs":
        with tempfile.TemporaryDirectory() as place:
            run_pairs(Path(place))
        return
    target = make_target()
    with tempfile.TemporaryDirectory(prefix="sglang-eagle3-") as place:
        folder = Path(place)
        if arguments.step == "default":
            run_default(target, folder, arguments.features, arguments.save_features, arguments.threads)
        elif arguments.step == "picture":
            draw_picture(target, folder, arguments.features, arguments.threads)
        elif arguments.step == "drift":
            run_drift(target, folder)
        elif arguments.step == "told":
            run_told(target, folder, arguments.features)
        else:
            run_served(target, folder, arguments.features, arguments.names or list(SERVED))


if __name__ == "__main__":
    main()
