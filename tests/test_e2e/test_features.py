"""States that SGLang's own engine writes for ``probe``, on the demo pair; oracle: transformers' own states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_eagle3_ext.cli import main
from sglang_eagle3_ext.formats import read_target
from sglang_eagle3_ext.host.features import write_states
from sglang_eagle3_ext.probe.features import Features, FeatureWriter, capture_elsewhere, encode, read_prompts
from sglang_eagle3_ext.reference import capture_hf, load, simulate_chain

pytestmark = [pytest.mark.host, pytest.mark.e2e]

STEPS = 3


@pytest.mark.parametrize(
    ("count", "new", "more"),
    [
        pytest.param(10, 24, [], id="one rank"),
        pytest.param(4, 8, ["--tp-size", "2"], id="two ranks"),
    ],
)
def test_sglang_writes_the_states_of_transformers(
    tmp_path: Path, target: Path, draft: Path, count: int, new: int, more: list[str]
) -> None:
    """More prompts than rows fit into a chunk, so that prompts are cut and mixed with answers."""
    said: list[str] = []
    prompts = read_prompts()[:count]
    with FeatureWriter(tmp_path / "f", target=str(target), steps=STEPS) as writer:
        capture_elsewhere(
            write_states,
            read_target(target),
            encode(prompts, target),
            [prompt.group for prompt in prompts],
            writer,
            max_new_tokens=new,
            steps=STEPS,
            dtype=torch.float32,
            flags=["--chunked-prefill-size", "64", "--enable-mixed-chunk", *more],
            say=said.append,
            progress=lambda done: None,
        )
    assert [line.startswith("SGLang is up: about ") for line in said] == [True]

    features = Features.open(tmp_path / "f")
    assert len(features.answers) == count
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    n = model.config.num_hidden_layers
    reference = load(draft, target=target)
    for answer in features.answers:
        expected = capture_hf(model, answer.tokens, [*range(n + 1), "final_norm"]).unflatten(1, (n + 2, -1))
        difference = (answer.states - expected)[:-1].abs().amax((0, 2)) / expected[:-1].abs().amax((0, 2))
        assert difference.max() <= 1e-4, difference
        written = answer.tokens[answer.prompt_length :]
        assert len(written) == new + STEPS
        with torch.inference_mode():
            logits = model(answer.tokens[None]).logits[0, answer.prompt_length - 1 : -1]
            # The other token of a near tie would be as right.
            assert (logits.max(-1).values - logits.gather(1, written[:, None])[:, 0]).max() < 1e-3
            counts = [
                simulate_chain(
                    reference, answer.tokens, states[:-1, [0, 4, 16]].flatten(1), answer.prompt_length, STEPS,
                    completion_tokens=answer.completion_tokens,
                )
                for states in (answer.states, expected)
            ]  # fmt: skip
        assert counts[0] == counts[1]


@pytest.mark.soak
def test_the_verdict_is_that_on_transformers_states(
    tmp_path: Path, target: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [prompt.content for prompt in read_prompts()[:24]]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    argv = ["probe", str(draft), "--target", str(target), "--prompts", str(tmp_path / "prompts.json"), "--json"]
    results = []
    for more in ([], ["--sglang", "--dtype", "float32"]):
        assert main([*argv, *more]) == 0
        results.append(json.loads(capsys.readouterr().out))
    # Both write the same texts in another order, on which intervals and the search depend, and counts do not.
    assert [r["verdict"] for r in results] == ["declared_right"] * 2
    assert results[0]["completion_tokens"] == results[1]["completion_tokens"]
    for key in ("accept_per_position", "verify_steps", "boundaries"):
        assert results[0]["declared"][key] == pytest.approx(results[1]["declared"][key]), key
