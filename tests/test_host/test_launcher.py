"""What the launcher says about the flags beside a draft; whole launches are in ``test_e2e/test_refusals.py``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from checkpoints import write_draft

from sglang_eagle3_ext.formats import read_draft
from sglang_eagle3_ext.host.launcher import flag_findings


def flags(**changes):
    plain = {
        "pp_size": 1,
        "enable_two_batch_overlap": False,
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    return SimpleNamespace(**(plain | changes))


def spec(tmp_path, **declared):
    changes = {"eagle3_ext": {"sources": ["embed", "layer3", "last"], **declared}}
    return read_draft(write_draft(tmp_path / "draft", config_changes=changes))


def found(*args):
    return [(f.severity, f.code) for f in flag_findings(*args)]


def test_flags_that_agree_say_nothing(tmp_path):
    draft = spec(tmp_path)
    assert found(flags(), 4, draft) == found(flags(), None, draft) == []
    assert found(flags(speculative_eagle_topk=4, speculative_num_draft_tokens=8), 8, draft) == []


@pytest.mark.parametrize(("strict", "severity"), [(False, "warning"), (True, "error")])
def test_adjusted_draft_tokens_are_said_with_the_effective_values(tmp_path, strict, severity, caplog):
    (finding,) = flag_findings(flags(), 7, spec(tmp_path, strict=strict))
    assert (finding.severity, finding.code) == (severity, "draft_tokens_adjusted")
    assert "got 7 with --speculative-num-steps 3" in finding.message
    assert "steps 3, topk 1, draft tokens 4" in finding.message
    # Where it is an error it is raised, and said once.
    assert len(caplog.records) == (0 if strict else 1)


def test_every_problem_is_found_at_once(tmp_path):
    args = flags(pp_size=2, enable_two_batch_overlap=True)
    assert found(args, 5, spec(tmp_path)) == [
        ("error", "pipeline_parallel"),
        ("error", "two_batch_overlap"),
        ("warning", "draft_tokens_adjusted"),
    ]
