"""The two exceptions that a user of this package can meet, and how those of others are put into words."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_eagle3_ext.spec import DraftSpec, Finding


class CheckpointError(ValueError):
    """Say that a draft, or a draft together with its target, cannot be served as it stands.

    The message holds every problem that was found, one per line, never only the first.

    Attributes:
        findings: the problems as data, empty when the error was raised with a plain message.
        spec: the draft as far as it could be read, with what is wrong taken for absent, so that the rest of it can
            be checked as well; ``None`` where nothing can.
    """

    def __init__(self, message: str, findings: Iterable[Finding] = (), spec: DraftSpec | None = None) -> None:
        super().__init__(message)
        self.findings: tuple[Finding, ...] = tuple(findings)
        self.spec = spec

    @classmethod
    def from_findings(cls, findings: Iterable[Finding], spec: DraftSpec | None = None) -> CheckpointError:
        """Build one error out of all findings of severity ``error``, each of them once."""
        errors = tuple(dict.fromkeys(f for f in findings if f.severity == "error"))
        return cls("\n".join(f.message for f in errors), errors, spec)


def first_line(error: BaseException) -> str:
    """Quote an error of someone else's in one line: the first of its message, or its name where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def whole_number(text: str) -> int:
    """Read a number of the command line; ``argparse`` by itself would name a function of ours instead of a remedy.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"got {text[:40]!r}; expected a whole number. Write one.") from None


class UnsupportedError(RuntimeError):
    """Say that this environment (SGLang, device, target class) cannot do what was asked."""
