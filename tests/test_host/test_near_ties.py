"""The judge of differences, on a small random model run by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_eagle3_ext.host.measure import Answer, Record
from sglang_eagle3_ext.host.near_ties import Disagreement, find_disagreements, judge

transformers = pytest.importorskip("transformers")
PREFIX = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def logits(model_folder: Path) -> torch.Tensor:
    model = transformers.LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([PREFIX])).logits[0, -1]


def disagreement(expected: int, got: int) -> Disagreement:
    return Disagreement("ours", 0, PREFIX, 5, expected, got)


def test_gap_is_the_difference_of_the_two_logits(model_folder: Path, logits: torch.Tensor):
    best, second = logits.topk(2).indices.tolist()
    (found,) = judge(model_folder, [disagreement(best, second)])
    assert found.gap == pytest.approx(float(logits[best] - logits[second]), abs=1e-5)
    assert (found.name, found.question, found.position) == ("ours", 0, 5)


def test_best_and_worst_token_are_no_near_tie(model_folder: Path, logits: torch.Tensor):
    best, worst = int(logits.argmax()), int(logits.argmin())
    (found,) = judge(model_folder, [disagreement(best, worst)])
    assert not found.is_near_tie
    assert found.gap > 10 * found.rounding > 0


def test_tokens_closer_than_bfloat16_can_tell_are_a_near_tie(tmp_path: Path, model_folder: Path):
    model = transformers.LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[11] = model.lm_head.weight[12] * (1 + 1e-4)
    model.save_pretrained(tmp_path)
    (found,) = judge(tmp_path, [disagreement(11, 12)])
    assert found.is_near_tie
    assert found.gap > 0


def test_nothing_to_judge_loads_no_model(tmp_path: Path):
    assert judge(tmp_path / "absent", []) == []


def test_in_float32_nothing_is_a_near_tie_and_no_model_is_loaded(tmp_path: Path):
    (found,) = judge(tmp_path / "absent", [disagreement(11, 12)], "float32")
    assert not found.is_near_tie
    assert found.gap is None


def test_an_answer_that_only_ends_early_is_no_near_tie(tmp_path: Path):
    (found,) = judge(tmp_path / "absent", [Disagreement("ours", 0, PREFIX, 5, 11, None)])
    assert not found.is_near_tie


def test_each_first_difference_is_found_once():
    def record(*texts: tuple[int, ...]) -> Record:
        return Record([Answer(0, r, (7, 8), text, None, ()) for r, text in enumerate(texts)], [1.0] * len(texts))

    records = {
        "baseline": record((1, 2, 3), (1, 2, 3), (1, 2, 3)),
        "stock": record((1, 2, 3), (1, 2, 3), (1, 2)),
        "ours": record((1, 5, 3), (1, 5, 9), (1, 2, 4)),
    }
    assert find_disagreements(records) == [
        Disagreement("stock", 0, (7, 8, 1, 2), 2, 3, None),
        Disagreement("ours", 0, (7, 8, 1), 1, 2, 5),
        Disagreement("ours", 0, (7, 8, 1, 2), 2, 3, 4),
    ]
