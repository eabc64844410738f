"""SGLang's flags in every spelling; oracle: the parser of SGLang's own command line."""

from __future__ import annotations

import argparse

import pytest

from sglang_eagle3_ext.host import bench, features, flags, guard, serve

pytestmark = pytest.mark.host

SERVE = [*" ".join(serve._READ).split(), *serve._READ_COUNTS, serve._READ_SWITCH]
LISTS = {
    "serve": SERVE,
    "bench sets": bench._OURS_TO_SET,
    "bench reads": bench._READ,
    "probe sets": features._OURS_TO_SET,
    "probe reads": features._READ,
    "config": ("--config",),
}


@pytest.fixture(scope="module")
def sglangs() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        action.required = False
    return parser


@pytest.mark.parametrize("names", LISTS.values(), ids=LISTS)
def test_every_name_that_sglang_has_for_a_flag_is_listed(sglangs: argparse.ArgumentParser, names: list[str]) -> None:
    for name in names:
        assert set(sglangs._option_string_actions[name].option_strings) <= set(names)


@pytest.mark.parametrize("names", LISTS.values(), ids=LISTS)
def test_what_sglang_takes_for_a_flag_is_found_and_no_other_flag_is(
    sglangs: argparse.ArgumentParser, names: list[str]
) -> None:
    every = sglangs._option_string_actions
    assert not [word for word in every if word not in names and flags.find([word], names)]
    abbreviated = 0
    for name in names:
        for end in range(3, len(name) + 1):
            spelled = name[:end]
            meant = [spelled] if spelled in every else [option for option in every if option.startswith(spelled)]
            if len({id(every[option]) for option in meant}) > 1:
                continue  # SGLang refuses it
            # Asked itself, the parser agrees on what this spelling stands for.
            action = every[meant[0]]
            value = [] if action.nargs == 0 else [(action.choices or ["12345"])[-1]]
            assert getattr(sglangs.parse_args([spelled, *value]), action.dest) != action.default
            assert flags.find([spelled, *value], names) == {spelled: meant[0]}
            assert flags.find(["=".join([spelled, *value])], names) == {spelled: meant[0]}
            abbreviated += spelled not in names
    assert abbreviated


@pytest.mark.parametrize("flag", ["--speculative-draft-model-path", "--speculative-draft-model-pa"])
def test_the_draft_is_found_on_a_command_line_that_nothing_else_reads(flag: str) -> None:
    assert guard._draft_on_command_line(["sglang", "--port", "1", flag, "D"]) == "D"
    assert guard._draft_on_command_line(["sglang", "--port", "1", f"{flag}=D"]) == "D"
    assert guard._draft_on_command_line(["sglang", "--speculative-draft-model-revision", "r"]) is None


@pytest.mark.parametrize("word", ["-1", "--", "-", "x", "", "--future-flag=--model-path", "--model-path-of-mine"])
def test_words_that_are_no_flag_of_ours_are_left_alone(word: str) -> None:
    assert flags.find([word], [*SERVE, *bench._OURS_TO_SET]) == {}
