"""Public failures of EAGLE-3 serving and the tests that hold their right values."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CASES: dict[str, tuple[str, ...]] = {
    "A02 no ids in the config, a default in silence": (
        "tests/test_assembly/test_plan.py::test_no_sources_take_the_default_of_stock_and_say_so",
        "tests/test_assembly/test_plan.py::test_strict_turns_ambiguities_into_errors",
        "tests/test_formats/test_dialects.py::test_what_an_id_means",
    ),
    "A05 ids at the top level or in eagle_config": (
        "tests/test_formats/test_dialects.py::test_what_an_id_means",
        "tests/test_formats/test_format_findings.py::test_reports",
        "tests/test_formats/test_read_draft.py::test_ids_in_eagle_config",
    ),
    "A06 a norm before fc that is not applied": (
        "tests/test_host/mla_draft_model.py::test_passes_equal_the_reference",
        "tests/test_formats/test_format_findings.py::test_reports",
        "tests/test_formats/test_read_draft.py::test_norm_over_the_concatenation",
    ),
    "A07 norm_before_residual that is not read": (
        "tests/test_host/draft_model.py::test_passes_equal_the_reference",
        "tests/test_reference/test_draft_against_trainers.py::test_speculators",
        "tests/test_reference/test_draft_against_oracle.py::test_switches_change_the_result",
    ),
    "A08 the draft's own embedding replaced by the target's": (
        "tests/test_host/draft_model.py::test_an_embedding_equal_to_the_targets_is_shared",
        "tests/test_host/draft_model.py::test_passes_equal_the_reference",
        "tests/test_host/mla_draft_model.py::test_passes_equal_the_reference",
    ),
    "A09 a file without a head": (
        "tests/test_formats/test_read_draft.py::test_full_vocabulary_borrows_the_head_of_the_target",
        "tests/test_formats/test_format_findings.py::test_reports",
        "tests/test_host/draft_model.py::test_what_is_borrowed_is_the_targets_own_tensor",
    ),
    "A10 d2t that is missing or means something else": (
        "tests/test_formats/test_format_findings.py::test_reports",
        "tests/test_reference/test_draft_ends.py::test_offset_and_absolute_maps_name_the_same_tokens",
        "tests/test_formats/test_dialects.py::test_a_pruned_draft_without_its_map_is_an_error",
    ),
    "A11 positions beyond the draft's own": (
        "tests/test_host/draft_model.py::test_positions_go_on_beyond_the_draft_s_own",
        "tests/test_host/test_draft_config.py::test_a_draft_that_brings_what_breaks_it_just_starts",
        "tests/test_host/mla_draft_model.py::test_a_longer_target_does_not_stretch_the_rotation",
    ),
    "A12 another rope_theta in training than in the config": (
        "tests/test_host/draft_model.py::test_passes_equal_the_reference",
        "tests/test_formats/test_dialects.py::test_a_renamed_upload_of_angelslim_needs_its_producer",
        "tests/test_formats/test_dialects.py::test_older_specforge_trained_with_one_base",
    ),
    "A13 one scaling in three spellings": (
        "tests/test_formats/test_rope.py::test_yarn_gives_one_table_in_every_spelling",
        "tests/test_formats/test_format_findings.py::test_rope_reads_the_same_in_every_spelling",
        "tests/test_formats/test_rope.py::test_a_kind_without_a_key_it_needs_is_an_error",
    ),
    "A14 steps, topk and draft tokens that do not fit": (
        "tests/test_host/test_serve_command.py::test_speculation_is_completed",
        "tests/test_host/test_launcher.py::test_adjusted_draft_tokens_are_said_with_the_effective_values",
        "tests/test_e2e/test_serving.py::test_draft_tokens_that_sglang_adjusts_are_said_once",
    ),
    "A15 tie_word_embeddings beside a stored head": (
        "tests/test_host/draft_model.py::test_passes_equal_the_reference",
        "tests/test_formats/test_dialects.py::test_angelslim",
        "tests/test_formats/test_format_findings.py::test_reports",
    ),
    "A16 a class name that stock does not know as a draft": (
        "tests/test_formats/test_dialects.py::test_exactly_one_dialect_claims_its_own_files_and_reads_the_same_draft",
        "tests/test_host/draft_model.py::test_sglang_sizes_its_buffers_from_the_draft",
        "tests/test_formats/test_dialects.py::test_drafts_that_no_dialect_serves",
    ),
    "A17 norms of queries and keys dropped": (
        "tests/test_host/draft_model.py::test_passes_equal_the_reference",
        "tests/test_reference/test_draft_against_transformers.py::test_layers_match",
        "tests/test_reference/test_draft_against_trainers.py::test_speculators",
    ),
    "A18 later layers read through the wrong norm": (
        "tests/test_host/draft_model.py::test_passes_equal_the_reference",
        "tests/test_reference/test_draft_against_trainers.py::test_speculators",
        "tests/test_formats/test_read_draft.py::test_later_layers_may_call_their_norm_hidden_norm",
    ),
    "A19 num_hidden_layers of the target": (
        "tests/test_host/draft_model.py::test_passes_equal_the_reference",
        "tests/test_host/draft_model.py::test_sglang_sizes_its_buffers_from_the_draft",
        "tests/test_formats/test_format_findings.py::test_reports",
    ),
    "A20 norm_output with two meanings": (
        "tests/test_host/draft_model.py::test_served_as_the_trainers_own_model_computes",
        "tests/test_formats/test_eagle3_ext.py::test_specforge_means_something_else_by_norm_output",
        "tests/test_reference/test_draft_against_trainers.py::test_specforge",
    ),
    "A21 biases dropped": (
        "tests/test_host/draft_model.py::test_passes_equal_the_reference",
        "tests/test_reference/test_draft_against_oracle.py::test_every_variant_matches_the_oracle",
        "tests/test_formats/test_read_draft.py::test_biases",
    ),
    "A31 another number of sources than three": (
        "tests/test_host/draft_model.py::test_the_mode_decides_where_both_widths_agree",
        "tests/test_host/draft_model.py::test_passes_equal_the_reference",
        "tests/test_host/target_proof.py::test_buffers_have_the_width_of_the_resolved_sources",
    ),
    "A32 a draft of another width than its target": (
        "tests/test_host/draft_model.py::test_passes_equal_the_reference",
        "tests/test_reference/test_draft_against_trainers.py::test_specforge",
        "tests/test_formats/test_dialects.py::test_sizes_that_are_null_or_absent_are_read_off_the_tensors",
    ),
    "A35 the draft's sliding window ignored": (
        "tests/test_host/draft_model.py::test_passes_equal_the_reference",
        "tests/test_reference/test_draft_against_oracle.py::test_every_variant_matches_the_oracle",
        "tests/test_formats/test_format_findings.py::test_reports",
    ),
    "A39 memory for what is borrowed anyway": (
        "tests/test_host/draft_model.py::test_what_is_borrowed_is_not_held_twice",
        "tests/test_host/draft_model.py::test_what_is_borrowed_is_the_targets_own_tensor",
        "tests/test_host/draft_model.py::test_an_embedding_equal_to_the_targets_is_shared",
    ),
    "A40 the target's quantisation on a plain draft": (
        "tests/test_host/test_draft_config.py::test_a_draft_that_brings_what_breaks_it_just_starts",
        "tests/test_host/test_serve_command.py::test_a_targets_quantisation_stays_away_from_the_draft",
        "tests/test_host/test_launcher.py::test_a_plain_draft_under_a_quantisation",
    ),
    "A41 EAGLE3 without the path of a draft": (
        "tests/test_e2e/test_refusals.py::test_refuses_with_a_clear_line_for_each_problem",
    ),
    "A45 a map that changes nothing is kept": (
        "tests/test_formats/test_read_draft.py::test_an_identity_map_is_not_kept",
        "tests/test_host/draft_model.py::test_passes_equal_the_reference",
        "tests/test_formats/test_format_findings.py::test_reports",
    ),
}


@cache
def functions_of(file: str) -> frozenset[str]:
    """Collect the names of the functions at the top level of a file."""
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_its_tests(case: str) -> None:
    tests = [named.split("::") for named in CASES[case]]
    assert tests
    assert [f"{file}::{name}" for file, name in tests if name not in functions_of(file)] == []
