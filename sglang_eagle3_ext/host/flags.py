"""SGLang's flags among the words that a command hands on to it, in every spelling that SGLang takes for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def find(words: Sequence[str], names: Collection[str]) -> dict[str, str]:
    """Find flags as SGLang's argparse does: written out, with ``=``, or abbreviated.

    Args:
        words: words of a command line.
        names: the flags, under each of their names. No flag but these may begin one of them.

    Returns:
        The spellings that stand for one of them, each with the flag.
    """
    found = {}
    for spelled in (word.partition("=")[0] for word in words if word.startswith("--")):
        meant = [spelled] if spelled in names else [name for name in names if name.startswith(spelled)]
        if meant and spelled != "--":
            found[spelled] = meant[0]
    return found


def abbreviation_problems(words: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """Report flags that SGLang would understand and that the command, which reads them too, would overlook."""
    for spelled, name in find(words, names).items():
        if spelled not in names:
            yield (
                f"{spelled}: got an abbreviation of {name}; expected that flag in full, because what is added beside "
                "it depends on it. Write it out."
            )


def handed_on_problems(
    words: Sequence[str], place: str, ours: Collection[str], read: Collection[str], instead: str
) -> Iterator[str]:
    """Report what may not stand among the flags that a command hands on behind its own.

    Args:
        words: the flags.
        place: behind what they stand.
        ours: flags that the command sets itself; SGLang would take the last of two.
        read: flags that the command may leave to the user, and looks at.
        instead: how to say what ``ours`` say.
    """
    clash = list(find(words, ours))
    if clash:
        yield (
            f"{place}: got {', '.join(clash)}; expected only flags that this command does not set itself. Leave "
            f"{'them' if len(clash) > 1 else 'it'} out; {instead}."
        )
    yield from abbreviation_problems(words, read)
    if find(words, ("--config",)):
        yield (
            f"{place}: got --config; expected every flag on the command line, where those that this command sets "
            "itself can be told. Write the file's flags out."
        )
