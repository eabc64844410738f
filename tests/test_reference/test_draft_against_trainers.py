"""``ReferenceDraft`` against the code that trains drafts: three unrolled steps of speculators and of SpecForge.

Both trainers feed the true tokens into every step, unlike a server, which feeds the draft's own; the chains of
the reference are driven with the same tokens here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from reference_drafts import make_spec, random_inputs, random_tensors

from sglang_eagle3_ext.reference import Chains, ReferenceDraft
from sglang_eagle3_ext.spec import DraftSpec, Rope

LENGTH, STEPS = 17, 3
FORCED_EOL = 0  # what both trainers read beyond the end of the text


@pytest.fixture(autouse=True)
def quiet_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep SGLang's plugin loader out of it, and torch.compile, for which a test machine may lack a compiler."""
    monkeypatch.setenv("SGLANG_PLUGINS", os.environ.get("SGLANG_PLUGINS", "none"))
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def unrolled(draft: ReferenceDraft, features: torch.Tensor, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the logits of each step when step k reads the text shifted by k."""
    before = torch.tensor([FORCED_EOL])  # the token at position 0 is read by no row
    here, cache = draft.feature_pass(draft.project(features), torch.cat([before, inputs]))
    chains = Chains(draft, cache, torch.arange(len(cache)))
    logits = [here.logits]
    for k in range(1, STEPS):
        shifted = torch.cat([inputs[k:], inputs.new_full((k,), FORCED_EOL)])
        here = chains.advance(shifted, here.state)
        logits.append(here.logits)
    return logits


SPECULATORS = {
    "classic": ({}, {}),
    "norm_before_residual": ({"norm_before_residual": True}, {"norms": {"residual": "post_norm"}}),
    "norm_before_fc": ({"norm_before_fc": True}, {"norms": {"around_fc": "concatenation"}}),
    "fc_norm": ({"fc_norm": True}, {"norms": {"around_fc": "per_source"}}),
    "norm_output": ({"norm_output": True}, {"norms": {"recurrent_state": "post_norm"}}),
    "all": (
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        {"norms": {"around_fc": "per_source", "residual": "post_norm", "recurrent_state": "post_norm"}},
    ),
    "two-layers": ({}, {"attention": {"num_layers": 2}}),
    "four-sources": ({}, {"num_sources": 4}),
}


def run_speculators(family: str, spec: DraftSpec, switches: dict, tensors: dict, features, inputs) -> tuple[list, list]:
    """Run speculators' own model; return the logits of each step and the tokens it drafts."""
    reason = "speculators is the oracle: pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0"
    core = pytest.importorskip("speculators.models.eagle3.core", reason=reason, exc_type=ImportError)
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    a = spec.attention
    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family](
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.head_dim,
        num_hidden_layers=a.num_layers,
        vocab_size=spec.vocab.target,
        rms_norm_eps=spec.rms_norm_eps,
        hidden_act=spec.hidden_act,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
    )
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=spec.vocab.draft,
        eagle_aux_hidden_state_layer_ids=list(range(spec.num_sources)),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **switches,
    )
    model = core.Eagle3DraftModel(config).double().eval()
    rest = model.load_state_dict(tensors, strict=False)
    assert not rest.unexpected_keys
    assert set(rest.missing_keys) <= {"t2d", "verifier_lm_head.weight", "verifier_norm.weight"}
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda m, args, out: logits.append(out[0]))
    with torch.no_grad():
        drafted = model(
            hidden_states=features[None],
            input_ids=inputs[None],
            document_ids=torch.zeros(1, len(inputs), dtype=torch.int64),
            ttt_steps=STEPS,
        )
    return logits, [ids[0] for ids in drafted]


@pytest.mark.parametrize(("switches", "changes"), SPECULATORS.values(), ids=SPECULATORS.keys())
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_speculators(family: str, switches: dict, changes: dict) -> None:
    changes = dict(changes)
    if family == "qwen3":
        changes["attention"] = {**changes.get("attention", {}), "qk_norm": True}
    spec = make_spec(**changes)
    tensors = random_tensors(spec)
    features, sequence = random_inputs(spec, LENGTH)
    theirs, drafted = run_speculators(family, spec, switches, tensors, features, sequence[1:])
    ours = unrolled(ReferenceDraft(spec, tensors, dtype=torch.float64), features, sequence[1:])
    for mine, other, ids in zip(ours, theirs, drafted, strict=True):
        # Norms, softmax and rotary tables of transformers run in float32.
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
        assert torch.equal(mine.argmax(-1), ids)


SPECFORGE = {
    "classic": ({}, {}),
    "fc_norm": ({"fc_norm": True}, {"norms": {"around_fc": "per_source"}}),
    # In SpecForge `norm_output` says whether the head reads the state through the final norm; what recurs is the
    # state before it either way.
    "norm_output": ({"norm_output": True}, {}),
    "no-norm_output": ({"norm_output": False}, {"norms": {"final_norm": False}}),
    "wider-target": ({"target_hidden_size": 20}, {"target_hidden_size": 20}),
}


def run_specforge(
    monkeypatch: pytest.MonkeyPatch, spec: DraftSpec, switches: dict, tensors: dict, features, inputs
) -> list[torch.Tensor]:
    """Run SpecForge's own training loop; return the logits of each step."""
    reason = "SpecForge is the oracle: pip install --no-deps specforge==0.2.0"
    drafts = pytest.importorskip("specforge.modeling.draft.llama3_eagle", reason=reason, exc_type=ImportError)
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from transformers import LlamaConfig

    a = spec.attention
    config = LlamaConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.head_dim,
        num_hidden_layers=1,
        vocab_size=spec.vocab.target,
        rms_norm_eps=spec.rms_norm_eps,
        hidden_act=spec.hidden_act,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        pad_token_id=0,
    )
    config.draft_vocab_size = spec.vocab.draft
    for name, value in switches.items():
        setattr(config, name, value)
    model = drafts.LlamaForCausalLMEagle3(config).eval()
    stored = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    rest = model.load_state_dict(stored, strict=False)
    assert not rest.unexpected_keys
    assert set(rest.missing_keys) <= {"t2d", "norm.weight"}
    chosen = tensors["d2t"] + torch.arange(spec.vocab.draft)
    model.t2d = torch.zeros(spec.vocab.target, dtype=torch.bool).index_fill(0, chosen, True)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda m, args, out: logits.append(out[0]))
    loop = OnlineEagle3Model(model, length=STEPS, attention_backend="sdpa")
    # The loss is a Triton kernel for GPUs, and no part of the recurrence.
    monkeypatch.setattr(loop, "_acc_and_loss", lambda **_: (torch.zeros(()),) * 7, raising=True)
    with torch.no_grad():
        loop(
            input_ids=inputs[None],
            attention_mask=torch.ones(1, len(inputs)),
            target=torch.zeros(1, len(inputs), spec.vocab.target),
            loss_mask=torch.ones(1, len(inputs), 1),
            hidden_states=features[None].float(),
        )
    return logits


@pytest.mark.parametrize(("switches", "changes"), SPECFORGE.values(), ids=SPECFORGE.keys())
def test_specforge(monkeypatch: pytest.MonkeyPatch, switches: dict, changes: dict) -> None:
    spec = make_spec(**changes, rope=Rope(theta=1000.0))
    tensors = {n: t if n == "d2t" else t.float() for n, t in random_tensors(spec).items()}
    features, sequence = random_inputs(spec, LENGTH)
    theirs = run_specforge(monkeypatch, spec, switches, tensors, features, sequence[1:])
    ours = unrolled(ReferenceDraft(spec, tensors, dtype=torch.float64), features, sequence[1:])
    assert len(theirs) == STEPS
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.float(), other, rtol=1e-3, atol=1e-3)
        assert torch.equal(mine.argmax(-1), other.argmax(-1))
