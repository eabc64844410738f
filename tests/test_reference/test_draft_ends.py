"""Both ends of a draft: vocabulary maps, borrowed and tied weights, and what is refused."""

from __future__ import annotations

import pytest
import torch
from reference_drafts import make_spec, random_inputs, random_tensors

from sglang_eagle3_ext.errors import CheckpointError, UnsupportedError
from sglang_eagle3_ext.reference import ReferenceDraft
from sglang_eagle3_ext.spec import Rope


def best_targets(draft: ReferenceDraft) -> torch.Tensor:
    features, sequence = random_inputs(draft.spec, 9)
    step, _ = draft.feature_pass(draft.project(features), sequence)
    assert torch.equal(step.best(), step.logits.argmax(-1))
    return draft.to_target(step.best())


def test_offset_and_absolute_maps_name_the_same_tokens() -> None:
    offset, absolute = (make_spec(vocab={"map": m}) for m in ("offset", "absolute"))
    tensors = random_tensors(offset)
    ids = tensors["d2t"] + torch.arange(20)
    assert torch.equal(ids, ids.sort().values)
    a = ReferenceDraft(offset, tensors, dtype=torch.float64)
    b = ReferenceDraft(absolute, tensors | {"d2t": ids}, dtype=torch.float64)
    assert torch.equal(a.to_target(torch.arange(20)), ids)
    assert torch.equal(best_targets(a), best_targets(b))


def test_without_a_map_ids_are_the_same() -> None:
    draft = ReferenceDraft(make_spec(vocab={"map": "none"}), random_tensors(make_spec(vocab={"map": "none"})))
    assert torch.equal(draft.to_target(torch.tensor([0, 19])), torch.tensor([0, 19]))


def test_a_borrowed_head_is_cut_down_to_the_draft_vocabulary() -> None:
    """Rows of the target's head that the map names, and no others, propose tokens."""
    spec = make_spec(lm_head="target", embed="target")
    tensors = random_tensors(spec)
    own = random_tensors(make_spec(vocab={"map": "none", "draft": 50}), seed=3)
    table, head = own["embed_tokens.weight"], own["lm_head.weight"]
    borrowed = ReferenceDraft(spec, tensors, embed=table, lm_head=head, dtype=torch.float64)
    ids = tensors["d2t"] + torch.arange(20)
    stored = ReferenceDraft(
        make_spec(),
        tensors | {"lm_head.weight": head[ids], "embed_tokens.weight": table},
        dtype=torch.float64,
    )
    assert borrowed.head.shape == (20, 12)
    assert torch.equal(best_targets(borrowed), best_targets(stored))


def test_a_tied_head_is_the_embedding() -> None:
    spec = make_spec(lm_head="tied", vocab={"map": "none", "draft": 50})
    tensors = random_tensors(spec)
    assert "lm_head.weight" not in tensors
    tied = ReferenceDraft(spec, tensors, dtype=torch.float64)
    split = ReferenceDraft(
        make_spec(vocab={"map": "none", "draft": 50}),
        tensors | {"lm_head.weight": tensors["embed_tokens.weight"]},
        dtype=torch.float64,
    )
    assert torch.equal(best_targets(tied), best_targets(split))


def test_an_embedding_in_bfloat16_is_promoted_exactly() -> None:
    spec = make_spec(embed="target")
    tensors = random_tensors(spec)
    table = random_tensors(make_spec())["embed_tokens.weight"].bfloat16()
    a = ReferenceDraft(spec, tensors, embed=table, dtype=torch.float64)
    b = ReferenceDraft(spec, tensors, embed=table.double(), dtype=torch.float64)
    features, sequence = random_inputs(spec, 6)
    steps = [d.feature_pass(d.project(features), sequence)[0] for d in (a, b)]
    assert torch.equal(steps[0].logits, steps[1].logits)


def test_reports_every_tensor_that_does_not_fit() -> None:
    spec = make_spec(fc_bias=True, norms={"around_fc": "per_source"})
    tensors = random_tensors(spec)
    del tensors["fc.bias"], tensors["fc_norm.2.weight"]
    tensors["fc.weight"] = torch.zeros(12, 24)
    tensors["d2t"] = tensors["d2t"][:19]
    tensors["lm_head.weight"] = torch.zeros(20, 11)
    with pytest.raises(CheckpointError) as error:
        ReferenceDraft(spec, tensors)
    message = str(error.value)
    assert "draft: fc.bias: got nothing; expected [12]" in message
    assert "draft: fc_norm.2.weight: got nothing; expected [12]" in message
    assert "draft: fc.weight: got [12, 24]; expected [12, 36]" in message
    assert "draft: d2t: got [19]; expected [20]" in message
    assert "draft: lm_head.weight: got [20, 11]; expected the draft's own, 12 columns wide" in message
    assert len(message.splitlines()) == 5


def test_needs_what_it_borrows() -> None:
    spec = make_spec(embed="target", lm_head="target")
    with pytest.raises(CheckpointError) as error:
        ReferenceDraft(spec, random_tensors(spec))
    lines = str(error.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["embed_tokens.weight", "lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: got \[50, 16\]; expected the target's, 12"):
        ReferenceDraft(spec, random_tensors(spec), embed=torch.zeros(50, 16), lm_head=torch.zeros(50, 12))
    with pytest.raises(CheckpointError, match="got 19 rows; expected at least 20"):
        ReferenceDraft(spec, random_tensors(spec), embed=torch.zeros(50, 12), lm_head=torch.zeros(19, 12))


def test_refuses_what_it_does_not_implement() -> None:
    spec = make_spec(hidden_act="quick_gelu", rope=Rope(1e4, {"rope_type": "longrope"}))
    with pytest.raises(UnsupportedError) as error:
        ReferenceDraft(spec, random_tensors(make_spec()))
    assert len(str(error.value).splitlines()) == 2
    assert "hidden_act: got quick_gelu" in str(error.value)
    assert "rope_scaling: got longrope" in str(error.value)


def test_refuses_features_of_another_width() -> None:
    draft = ReferenceDraft(make_spec(), random_tensors(make_spec()))
    with pytest.raises(ValueError, match=r"features: got \[4, 24\]; expected \[T, 36\], 3 sources of 12"):
        draft.project(torch.zeros(4, 24))
    with pytest.raises(ValueError, match=r"hidden: got \[3, 12\] for 5 tokens"):
        draft.feature_pass(torch.zeros(3, 12), torch.zeros(5, dtype=torch.int64))
