"""Each kind of bad input at the command line: exit code 1, one clear line that names file and key, no traceback."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from checkpoints import DELETE, Dialect, write_draft, write_target
from safetensors.torch import load_file, save_file

from sglang_eagle3_ext import cli

WEIGHTS = "model.safetensors"
ZEROS, TOKENS = torch.zeros(37, dtype=torch.int64), torch.arange(37)
IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"
SOURCES = {"eagle3_ext": {"sources": ["embed", "layer3", "layer5"]}}


class Kind(NamedTuple):
    """A damage and the line that must tell it, or ``resolved`` with what is then taken."""

    said: str
    config: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor | None] = {}
    sizes: dict[str, int] = {}
    damage: Callable[[Path], object] | None = None
    flags: tuple[str, ...] = ()
    resolved: str | None = None


def write_index(folder):
    index = {"weight_map": {"fc.weight": WEIGHTS, "norm.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut(folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


KINDS = {
    # What the config leaves out or says wrongly about sizes, head and vocabulary.
    "draft_vocab_size absent": Kind("", {"draft_vocab_size": DELETE}, resolved="37 of 96, map offset"),
    "draft_vocab_size null": Kind("", {"draft_vocab_size": None}, resolved="37 of 96, map offset"),
    "target_hidden_size null": Kind("", {"target_hidden_size": None}, resolved="3 x 32 = 96 -> 32"),
    "tied beside a head": Kind(
        "config.json:tie_word_embeddings: got true beside a stored lm_head.weight",
        {"tie_word_embeddings": True},
        resolved="head",
    ),
    "layers of the target": Kind(
        "config.json:num_hidden_layers: got 36, the file holds 1 layer;", {"num_hidden_layers": 36}, resolved="1 gqa"
    ),
    "no head, pruned": Kind("draft_vocab_size: got 37 of 96 without a head", tensors={"lm_head.weight": None}),
    "no map": Kind("draft_vocab_size: got 37 of 96 and no d2t", tensors={"d2t": None, "t2d": None}),
    "map out of range": Kind("model.safetensors:d2t: read as offset, draft token 36", tensors={"d2t": ZEROS + 60}),
    "map repeats": Kind("two draft tokens become target token 0", tensors={"d2t": -TOKENS, "t2d": None}),
    "maps disagree": Kind("d2t and t2d disagree about target token 0", tensors={"t2d": torch.zeros(96).bool()}),
    "map of numbers": Kind("model.safetensors:d2t: got F32; expected integers", tensors={"d2t": torch.zeros(37)}),
    # Files.
    "truncated": Kind("model.safetensors: cannot be read, got", damage=cut),
    "wrong shape": Kind("fc.weight: got [31, 96]; expected [32, 96]", tensors={"fc.weight": torch.ones(31, 96)}),
    "not finite": Kind(
        "fc.weight: got 3072 values that are NaN", tensors={"fc.weight": torch.ones(32, 96) / 0}, flags=("--weights",)
    ),
    "no JSON": Kind("config.json: cannot be read", damage=lambda p: (p / "config.json").write_text('{"a": 1,}')),
    "shard absent": Kind("index.json:weight_map: names model-2.safetensors, which", damage=write_index),
    "unknown key": Kind("config.json:eagle3_ext.sorces: unknown key", {"eagle3_ext": {"sorces": ["embed"]}}),
    "ids out of range": Kind(
        "eagle_config.eagle_aux_hidden_state_layer_ids: got id 9 (boundary 10) for", {IDS: [1, 3, 9]}
    ),
    "ids below all": Kind("got id -5 (boundary -4) for a target of 8 layers", {IDS: [-5, 1, 3]}),
    "sources twice": Kind(
        "eagle3_ext.sources: got ['embed', 'boundary0', 'layer3'], which names boundary 0 more than once",
        {"eagle3_ext": {"sources": ["embed", "boundary0", "layer3"]}},
    ),
}


def run(capsys, *argv):
    code = cli.main(["inspect", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out + err


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_is_one_clear_line(tmp_path, capsys, kind):
    config = {**({} if kind.config.keys() & {IDS, "eagle3_ext"} else SOURCES), **kind.config}
    draft = write_draft(tmp_path / "d", config_changes=config, tensor_changes=kind.tensors, **kind.sizes)
    if kind.damage is not None:
        kind.damage(draft)
    code, text = run(capsys, draft, "--target", write_target(tmp_path / "t"), *kind.flags)
    assert code == (kind.resolved is None)
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if kind.said in line]
    assert lines
    if kind.said:
        # One line tells it, from the file's name to what to do.
        assert len(lines) == 1
        assert str(draft) in lines[0]
        assert lines[0].endswith(".")
        assert "; " in lines[0]
    if kind.resolved is not None:
        assert kind.resolved in text
        assert text.rstrip().endswith("can be served")


@pytest.mark.parametrize(
    ("config", "tensors", "sizes", "code"),
    [
        ({"eagle3_ext": {"sources": ["embed", "embed", "layer3"]}}, {}, {}, "duplicate_source"),
        ({"eagle3_ext": {"sources": ["embed", "boundary0", "layer3"]}}, {}, {}, "duplicate_source"),
        ({IDS: [1, 1, 3]}, {}, {}, "duplicate_source"),
        ({IDS: [-5, 1, 3]}, {}, {}, "source_beyond_depth"),
        ({IDS: []}, {}, {}, "source_count"),
        ({IDS: list(range(10))}, {}, {"num_sources": 10}, "source_count"),
        ({}, {}, {"num_sources": 10}, "fc_width"),
        ({}, {}, {"num_sources": 2}, "fc_width"),
        ({}, {"fc.weight": torch.ones(32, 0)}, {}, "tensor_shape"),
    ],
)
@pytest.mark.parametrize("with_target", [False, True])
def test_what_needs_no_target_is_found_without_one(tmp_path, capsys, config, tensors, sizes, code, with_target):
    draft = write_draft(tmp_path / "d", config_changes=config, tensor_changes=tensors, **sizes)
    flags = ("--target", write_target(tmp_path / "t")) if with_target else ()
    exit_code, text = run(capsys, draft, *flags, "--json")
    assert exit_code == 1
    assert code in {f["code"] for f in json.loads(text)["findings"] if f["severity"] == "error"}


def test_a_wrong_key_hides_neither_values_nor_the_target(tmp_path, capsys):
    draft = write_draft(
        tmp_path / "d", config_changes={**SOURCES, "fc_norm": 3}, tensor_changes={"fc.weight": torch.ones(32, 96) / 0}
    )
    target = write_target(tmp_path / "t", config_changes={"vocab_size": 95, "hidden_size": 48})
    code, text = run(capsys, draft, "--target", target, "--weights")
    said = ("config.json:fc_norm: got 3", "fc.weight: got 3072 values", "vocab_size: 96, got", "hidden_size 48; both")
    assert code == 1
    assert len(text.splitlines()) == len(said)
    assert all(part in text for part in said)


@pytest.mark.parametrize("width", ["48", -48])
def test_a_wrong_width_of_the_target_is_one_error(tmp_path, capsys, width):
    draft = write_draft(tmp_path / "d", target_hidden=48, config_changes={**SOURCES, "target_hidden_size": width})
    for hidden, count in ((48, 1), (64, 2)):
        target = write_target(tmp_path / f"t{hidden}", config_changes={"hidden_size": hidden})
        code, text = run(capsys, draft, "--target", target, "--json")
        errors = [f["code"] for f in json.loads(text)["findings"] if f["severity"] == "error"]
        assert (code, "target_width" in errors) == (1, hidden == 64), errors
        assert len(set(errors) - {"fc_width"}) == count, errors


def test_a_missing_target_hides_neither_sources_nor_values(tmp_path, capsys):
    sources = {"eagle3_ext": {"sources": ["embed", "boundary0", "layer3"]}}
    draft = write_draft(tmp_path / "d", config_changes=sources, tensor_changes={"fc.weight": torch.ones(32, 96) / 0})
    code, text = run(capsys, draft, "--target", tmp_path / "nowhere", "--weights")
    assert code == 1
    assert len(text.splitlines()) == 3
    for part in ("boundary0 more than once", "got 3072 values that are NaN", "nowhere: no such folder"):
        assert part in text


@pytest.mark.parametrize(
    "command",
    [("inspect",), ("configure", "--set", "strict=true", "--print"), ("export", "--for", "stock", "--out", "x")],
)
def test_a_broken_target_hides_no_error_of_the_draft(tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    draft = write_draft(tmp_path / "d", config_changes={**SOURCES, "hidden_act": "gelu"})
    target = write_target(tmp_path / "t", config_changes={"vocab_size": 0})
    assert cli.main([command[0], str(draft), "--target", str(target), *command[1:]]) == 1
    text = capsys.readouterr().err
    assert "hidden_act: got 'gelu'" in text
    assert "vocab_size: got 0" in text


# --trace


@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_the_trace_has_the_shapes_of_the_tensors(tmp_path, capsys, dialect):
    target_hidden = 20
    draft = write_draft(tmp_path / "d", dialect, num_sources=2, target_hidden=target_hidden)
    sizes = {name: tuple(tensor.shape) for name, tensor in load_file(draft / WEIGHTS).items()}

    def rows(part, axis=0):
        return next(shape[axis] for name, shape in sizes.items() if name.endswith(f"{part}.weight"))

    _, text = run(capsys, draft, "--trace")
    lines = text[text.index("feature pass") :].splitlines()
    steps = [re.split(r"\s{2,}", line.strip()) for line in lines if "[T, " in line]
    seen = [(step[0], step[-1].strip("[]").rpartition(", ")[2]) for step in steps]
    expected: list[tuple[str, int]] = [
        ("concatenate", rows("fc", 1)),
        ("fc", rows("fc")),
        ("concatenate", rows("q_a_proj" if dialect == "deepseek" else "q_proj", 1)),
        ("o_proj + residual", rows("o_proj")),
        ("post_attention_layernorm -> gate, up", rows("up_proj")),
        ("down + residual", rows("down_proj")),
        ("final norm", rows("fc")),
        ("head (own)", rows("lm_head")),
        ("attention", rows("o_proj", 1)),
    ]
    if dialect == "deepseek":
        latent = rows("kv_a_layernorm")
        expected += [
            ("q_a_proj -> q_a_layernorm", rows("q_a_proj")),
            ("q_b_proj -> rope on R of D", rows("q_b_proj")),
            ("kv_a_proj_with_mqa: latent -> kv_a_layernorm", latent),
            ("kv_a_proj_with_mqa: key of all heads -> rope", rows("kv_a_proj_with_mqa") - latent),
        ]
        keys, values = (int(dict(seen)[f"kv_b_proj: {part}"]) for part in ("keys", "values"))
        assert keys + values == rows("kv_b_proj")
    else:
        expected += [("q_proj -> rope", rows("q_proj")), ("k_proj -> rope, v_proj", rows("k_proj"))]
    for step, size in expected:
        assert (step, str(size)) in seen, (step, size, seen)
    assert sum(size == str(target_hidden) for _, size in seen) == 2  # one row for each source


# Output


def test_numbers_that_json_has_no_word_for(tmp_path, capsys):
    scaling = {"rope_type": "linear", "factor": 2.0, "note": [float("nan"), {"of": float("inf")}]}
    draft = write_draft(tmp_path, config_changes={"rope_scaling": scaling, **SOURCES})
    _, text = run(capsys, draft, "--json")

    def refuse(word):
        raise AssertionError(word)

    assert json.loads(text, parse_constant=refuse)["rope"]["scaling"]["factor"] == 2.0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_path_that_the_terminal_cannot_spell(tmp_path, encoding):
    draft = write_draft(tmp_path / "\u5c42", config_changes=SOURCES)
    command = [sys.executable, "-m", "sglang_eagle3_ext.cli", "inspect", str(draft)]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert ("\u5c42".encode() if encoding == "utf-8" else rb"\u5c42") in done.stdout.splitlines()[0]


@pytest.mark.parametrize(
    "argv",
    [
        ("configure", "--set", r'sources=["\ud800"]'),
        ("configure", "--set", r'expected={"\ud800": 1}'),
        ("inspect", "--override", r'{"sources": ["\ud800"]}'),
    ],
)
def test_half_a_character_on_the_command_line(tmp_path, capsys, argv):
    draft = write_draft(tmp_path)
    before = (draft / "config.json").read_bytes()
    with pytest.raises(SystemExit) as stopped:
        cli.main([argv[0], str(draft), *argv[1:]])
    assert stopped.value.code == 2
    assert "; expected " in capsys.readouterr().err
    assert (draft / "config.json").read_bytes() == before
    assert sorted(path.name for path in draft.iterdir()) == ["config.json", WEIGHTS]


def test_weights_that_are_no_numbers_are_not_exported(tmp_path, capsys):
    draft = write_draft(tmp_path / "d", config_changes=SOURCES)
    tensors = load_file(draft / WEIGHTS)
    tensors["fc.weight"][3, 5] = float("nan")
    tensors["norm.weight"][:2] = float("inf")
    save_file(tensors, draft / WEIGHTS)
    out = tmp_path / "out"
    target = write_target(tmp_path / "t")
    assert cli.main(["export", str(draft), "--for", "stock", "--target", str(target), "--out", str(out)]) == 1
    err = capsys.readouterr().err
    assert f"{draft}/{WEIGHTS}:fc.weight: got 1 values that are NaN" in err
    assert f"{draft}/{WEIGHTS}:norm.weight: got 2 values that are NaN" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "t"]


# A big file

MEASURED = """
import sys, time
from sglang_eagle3_ext import cli
code = cli.main(["inspect", *sys.argv[1:]])
# Not ru_maxrss, which begins at the size of the process that started this one.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.process_time(), int(peak.split()[1]) / 1024, file=sys.stderr)
sys.exit(code)
"""


def write_big_draft(folder: Path) -> int:
    """Write a draft of 2 GB whose values are holes, but for the tokens it keeps; return the size of its weights."""
    vocab, kept, width, inner = 440_000, 32_000, 2048, 8192
    config = {"vocab_size": vocab, "draft_vocab_size": kept, "hidden_size": width, "intermediate_size": inner}
    config |= {
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "torch_dtype": "bfloat16",
        **SOURCES,
    }
    write_draft(folder, config_changes=config)
    layer, attention = "midlayer.", "midlayer.self_attn."
    shapes: dict[str, tuple[str, list[int]]] = {
        "embed_tokens.weight": ("BF16", [vocab, width]),
        "lm_head.weight": ("BF16", [kept, width]),
        "fc.weight": ("BF16", [width, 3 * width]),
        f"{attention}q_proj.weight": ("BF16", [2048, 2 * width]),
        f"{attention}k_proj.weight": ("BF16", [512, 2 * width]),
        f"{attention}v_proj.weight": ("BF16", [512, 2 * width]),
        f"{attention}o_proj.weight": ("BF16", [width, 2048]),
        f"{layer}mlp.gate_proj.weight": ("BF16", [inner, width]),
        f"{layer}mlp.up_proj.weight": ("BF16", [inner, width]),
        f"{layer}mlp.down_proj.weight": ("BF16", [width, inner]),
        "d2t": ("I64", [kept]),
        "t2d": ("BOOL", [vocab]),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes |= {name: ("BF16", [width]) for name in ("norm.weight", *(f"{layer}{norm}.weight" for norm in norms))}
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + torch.Size(shape).numel() * {"BF16": 2, "I64": 8, "BOOL": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(folder / WEIGHTS, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        file.seek(8 + len(text) + header["t2d"]["data_offsets"][0])
        file.write(b"\1" * kept)
    return end


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc here")
def test_a_look_at_two_gigabytes_is_quick_and_small(tmp_path):
    assert write_big_draft(tmp_path) > 2e9
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, check=False, text=True, env=environment)
    assert done.stdout.rstrip().endswith("can be served"), done.stdout + done.stderr
    seconds, megabytes = map(float, done.stderr.split())
    assert seconds < 2
    assert megabytes < 300


ANONYMOUS = """
import sys, threading
from sglang_eagle3_ext.cli import main
most, over = 0, threading.Event()
def look():
    global most
    while not over.wait(0.01):
        line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
        most = max(most, int(line.split()[1]))
looking = threading.Thread(target=look)
looking.start()
code = main(["inspect", sys.argv[1], "--weights"])
over.set()
looking.join()
print(most / 1024, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.soak
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc here")
def test_values_of_two_gigabytes_are_read_in_parts(tmp_path):
    """The largest tensor alone has 1.8 GB. Pages of the file itself do not count: they go when memory is short."""
    write_big_draft(tmp_path)
    command = [sys.executable, "-c", ANONYMOUS, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, check=False, text=True, env=environment)
    # Zeros tell it that the head was pruned wrongly: every value was looked at.
    assert done.stdout.rstrip().endswith("cannot be served: 1 error"), done.stdout + done.stderr
    assert float(done.stderr.split()[-1]) < 500
