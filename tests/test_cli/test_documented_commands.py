"""What README and docs show to be typed: commands that the parser takes, targets of make that exist, live links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from sglang_eagle3_ext import cli

ROOT = Path(__file__).parents[2]
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))}
COMMAND = re.compile(r"(?:[A-Z_]+=\S* )*(?:\.venv/bin/)?(sglang-eagle3 .+)")


def commands(text: str) -> list[list[str]]:
    """List the words of every ``sglang-eagle3`` command of a page: of all in blocks, of whole ones in running text."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    blocks = [block for kind, block in fence.findall(text) if kind in ("bash", "console")]
    lines = [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [line for line in re.findall(r"`([^`\n]+)`", fence.sub("", text)) if " DRAFT" in line]
    found = []
    for part in (part.strip() for line in lines for part in line.split(" && ")):
        match = COMMAND.fullmatch(part)
        if match is not None:
            words = shlex.split(match[1], comments=True)
            end = next((i for i, word in enumerate(words) if word in {">", "|"}), len(words))
            found.append(words[1:end])
    return found


COMMANDS = [(page, words) for page, text in PAGES.items() for words in commands(text)]


def test_there_are_commands_of_every_kind():
    shown = {words[0] for _, words in COMMANDS}
    assert shown == {"serve", "inspect", "doctor", "probe", "configure", "export", "bench"}


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)}" for page, words in COMMANDS])
def test_the_parser_takes_what_is_shown(page: str, words: list[str], capsys: pytest.CaptureFixture[str]):
    try:
        args = cli._parser().parse_args(words)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    given = [str(value) for value in vars(args).values() if str(value).startswith("benchmarks/")]
    assert all((ROOT / path).exists() for path in given)


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {name for text in PAGES.values() for name in re.findall(r"(?:^|`|&& )make ([a-z]+)\b", text, re.MULTILINE)}
    assert shown
    assert shown <= targets


def test_links_lead_to_files_and_headings():
    dead = []
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, heading = target.partition("#")
            file = ((ROOT / page).parent / path) if path else ROOT / page
            if not file.exists():
                dead.append(f"{page}: {target}")
            elif heading:
                slugs = {
                    re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
                    for line in re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
                }
                if heading not in slugs:
                    dead.append(f"{page}: {target}")
    assert dead == []
