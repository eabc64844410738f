"""Rows of forward passes in the file that ``probe --sglang`` reads; the passes are made up, their modes SGLang's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_eagle3_ext.errors import CheckpointError
from sglang_eagle3_ext.host import features
from sglang_eagle3_ext.spec import TargetFacts

pytestmark = pytest.mark.host

LAYERS, WIDTH, AT = 2, 3, 16
FACTS = TargetFacts("t", "LlamaForCausalLM", LAYERS, WIDTH, 50, None)
LENGTHS = {"a": (0, 6), "b": (6, 11)}
"""Where the rows of two sequences begin and end."""


def state(sequence: str, position: int) -> torch.Tensor:
    """Tell every state of every token from every other: [n + 2, M]."""
    base = 1000.0 * (sequence == "b") + 10.0 * position
    return base + 100.0 * torch.arange(LAYERS + 2)[:, None] + torch.arange(1, WIDTH + 1)


def keep(keeper: features.Keeper, mode: ForwardMode, parts: list[tuple[str, range]], padding: int = 0) -> None:
    """Run a pass over some positions of some sequences; ``x`` is nobody's."""
    rows = [state(name, p) for name, positions in parts for p in positions] + [torch.full((4, 3), -9.0)] * padding
    rids = [f"eagle3-rows-{LENGTHS[n][0]}-{LENGTHS[n][1]}" if n in LENGTHS else f"trial-1-{n}-5" for n, _ in parts]
    batch: Any = SimpleNamespace(
        forward_mode=mode,
        rids=rids,
        positions=torch.tensor([p for _, positions in parts for p in positions] + [0] * padding),
        extend_seq_lens_cpu=[len(positions) for _, positions in parts] if mode.is_extend() else None,
    )
    keeper.keep(list(torch.stack(rows, 1)), batch)


@pytest.fixture
def place(tmp_path: Path) -> features.Place:
    (tmp_path / "f").write_bytes(bytes(AT + 11 * (LAYERS + 2) * WIDTH * 4))
    return features.Place(str(tmp_path / "f"), AT, 11, "float32")


def test_every_row_comes_to_its_place_however_the_passes_are_cut(place: features.Place) -> None:
    keeper = features.Keeper(place, FACTS)
    keep(keeper, ForwardMode.EXTEND, [("x", range(2)), ("a", range(3)), ("b", range(2))], padding=2)
    keep(keeper, ForwardMode.MIXED, [("b", range(2, 3)), ("a", range(3, 4))])
    keep(keeper, ForwardMode.DECODE, [("a", range(4, 5)), ("x", range(2, 3)), ("b", range(3, 4))], padding=1)
    # The last token's row, and one beyond the end that overlap scheduling computes: it must not reach the next answer.
    keep(keeper, ForwardMode.DECODE, [("a", range(6, 7))])
    got = torch.frombuffer(bytearray(Path(place.file).read_bytes()[AT:]), dtype=torch.float32).view(11, 4, 3)
    wanted = torch.zeros(11, 4, 3)
    for name, (begin, end) in LENGTHS.items():
        for position in range(end - begin - 1):
            wanted[begin + position] = state(name, position)
    assert torch.equal(got, wanted)


def test_requests_of_others_and_idle_passes_write_nothing(place: features.Place) -> None:
    before = Path(place.file).read_bytes()
    keeper = features.Keeper(place, FACTS)
    keep(keeper, ForwardMode.EXTEND, [("x", range(2))])
    keep(keeper, ForwardMode.IDLE, [("a", range(2))])
    assert Path(place.file).read_bytes() == before


def test_states_of_another_dtype_stop_the_server(place: features.Place) -> None:
    keeper = features.Keeper(features.Place(place.file, AT, 5, "bfloat16"), FACTS)
    with pytest.raises(RuntimeError, match=r"got states in torch\.float32; expected torch\.bfloat16"):
        keep(keeper, ForwardMode.EXTEND, [("a", range(2))])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--model-path", "x"),
            "--sglang: got --model-path; expected only flags that this command does not set itself.",
        ),
        (("--model=x",), "--sglang: got --model; "),
        (("--model-pa", "x"), "--sglang: got --model-pa; "),
        (("--rev=x",), "--sglang: got --rev; "),
        (("--port", "1", "--host=::"), "--sglang: got --port, --host; expected "),
        (("--dty", "float16"), "--dty: got an abbreviation of --dtype; "),
        (("--config", "x.yaml"), "--sglang: got --config; expected every flag on the command line"),
    ],
)
def test_flags_that_are_settled_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(features, "running", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(CheckpointError) as caught:
        features.write_states(
            tmp_path, [[1]], 1, tmp_path / "f", 0, dtype=torch.float32, flags=words, say=print, progress=print
        )
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_flags_that_scatter_the_rows_are_refused_all_at_once() -> None:
    from sglang.srt.server_args import ServerArgs

    assert features.flag_problems(ServerArgs(model_path="t", tp_size=8)) == []
    args = ServerArgs(model_path="t", pp_size=2, dp_size=2, speculative_algorithm="EAGLE3")
    problems = "\n".join(features.flag_problems(args))
    assert problems.count("; expected ") == 3
    assert "--pp-size: got 2; expected one stage" in problems
