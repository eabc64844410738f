"""The demo pair on two ranks of SGLang's own server, against the same pair on one.

Its nine heads do not divide by two: SGLang serves twelve, three of them zero.
"""

from __future__ import annotations

import pytest
from recorder import Recorder

pytestmark = pytest.mark.e2e


def test_two_ranks_give_the_tokens_and_accept_counts_of_one(answers: Recorder) -> None:
    two = answers("two_ranks")
    assert two == answers("chain")[: len(two)]
    assert len(two) == 4


def test_each_rank_projects_its_columns_and_proves_its_states(answers: Recorder) -> None:
    log = answers.log("two_ranks")
    assert "fc: 288 of 576 columns on each of 2 ranks" in log
    assert "3 of 3 state(s) equal the residual stream" in log
    assert "fc <- [embedding | layer 3 output | layer 15 output]" in log
