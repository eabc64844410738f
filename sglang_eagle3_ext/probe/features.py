"""What a target writes to real prompts, and every boundary of its residual stream meanwhile.

``capture`` runs a target of transformers; ``FeatureWriter`` and ``Features`` are the file in between, which may be
written elsewhere.

Dimensions: R rows (tokens of all sequences), T tokens of one sequence, S sequences, n layers of the target, M target
width. The boundary axis of states has n + 2 places: boundaries 0..n, then ``final_norm``.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_eagle3_ext.errors import CheckpointError, first_line
from sglang_eagle3_ext.reference import final_norm
from sglang_eagle3_ext.spec import TargetFacts


def _is_unicode(text: str) -> bool:
    """Say whether a text can be encoded: half of a surrogate pair is JSON, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        content: text, which goes through the target's chat template where it has one, or token ids as they are.
        group: the group it is drawn from, over which intervals are stratified.
    """

    content: str | tuple[int, ...]
    group: str | None = None


def read_prompts(file: Path | None = None) -> tuple[Prompt, ...]:
    """Read a JSON file of prompts.

    Args:
        file: a list of prompts, or an object ``{group: [prompts]}``; a prompt is a string, ``{"prompt": ...}`` or a
            list of token ids. By default the package's own: eight groups of thirty-seven.

    Returns:
        The prompts, the groups taking turns, so that the first N are as varied as all.

    Raises:
        CheckpointError: it cannot be read, or an entry is something else; names every such entry.
    """
    try:
        if file is None:
            content = json.loads(resources.files(__package__).joinpath("prompts.json").read_text("utf-8"))
        else:
            content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: cannot be read, got {error}; expected a JSON file of prompts. Repair it."
        ) from error
    groups: Mapping[str | None, Any] = content if isinstance(content, dict) else {None: content}
    problems: list[str] = []
    read: list[list[Prompt]] = []
    for group, items in groups.items():
        where = f"{file}:{group}" if group is not None else str(file)
        if not isinstance(items, list):
            problems.append(f"{where}: got {type(items).__name__}; expected a list of prompts. Write one.")
            continue
        read.append([])
        for i, item in enumerate(items):
            entry = item.get("prompt") if isinstance(item, dict) else item
            if isinstance(entry, str) and entry.strip() and _is_unicode(entry):
                read[-1].append(Prompt(entry, group))
            elif isinstance(entry, list) and entry and all(type(t) is int and t >= 0 for t in entry):
                read[-1].append(Prompt(tuple(entry), group))
            else:
                problems.append(
                    f"{where}[{i}]: got {json.dumps(item)[:60]}; expected text, token ids or "
                    '{"prompt": ...}. Correct it.'
                )
    turns = [prompts[i] for i in range(max(map(len, read), default=0)) for prompts in read if i < len(prompts)]
    if not turns and not problems:
        problems.append(f"{file}: got no prompt; expected at least one. Add some.")
    if problems:
        raise CheckpointError("\n".join(problems))
    return tuple(turns)


def encode(prompts: Sequence[Prompt], target: str | Path) -> list[list[int]]:
    """Turn prompts into token ids by the target's own tokenizer and chat template.

    Args:
        prompts: the prompts.
        target: folder of the target; its tokenizer is only loaded where a prompt is text.

    Returns:
        Token ids up to where the answer begins.

    Raises:
        CheckpointError: the target has no tokenizer that can be loaded, or it makes no token of some prompts.
    """
    tokenizer: Any = None
    encoded: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt.content, tuple):
            encoded.append(list(prompt.content))
            continue
        if tokenizer is None:
            from transformers import AutoTokenizer

            try:
                tokenizer = AutoTokenizer.from_pretrained(target)
            except Exception as error:
                # Whatever the tokenizers' libraries raise; transformers has no class for it.
                raise CheckpointError(
                    f"{target}: its tokenizer cannot be loaded, got {first_line(error)}; expected one, to "
                    "read the prompts. Give --prompts as lists of token ids."
                ) from error
        if tokenizer.chat_template is None:
            encoded.append(tokenizer(prompt.content)["input_ids"])
            continue
        chat = [{"role": "user", "content": prompt.content}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        encoded.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    empty = [prompt for prompt, ids in zip(prompts, encoded, strict=True) if not ids]
    if empty:
        listed = ", ".join(json.dumps(prompt.content)[:60] for prompt in empty[:5])
        raise CheckpointError(
            f"--prompts: got {len(empty)} of which {target} makes no token: {listed}; expected at least one token of "
            "each. Leave them out, or give lists of token ids."
        )
    return encoded


STATES_AT = 1 << 20
"""Where the states begin in a feature file: its header is only known in the end."""

BATCH_BYTES = 512 << 20
"""States of a batch of answers that are held in memory before they go to the file."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Engine(Protocol):
    """Whatever lets a target write greedily and keeps all of its states, in place of transformers."""

    def __call__(
        self,
        target: Path,
        prompts: Sequence[Sequence[int]],
        new: int,
        file: Path,
        at: int,
        *,
        dtype: torch.dtype,
        flags: Sequence[str],
        say: Callable[[str], object],
        progress: Callable[[int], object],
    ) -> list[list[int]]:
        """Answer prompts, in any order and whatever ends an answer.

        Args:
            target: folder of the target.
            prompts: token ids of each prompt.
            new: tokens to write to each.
            file: a file that is large enough for the states.
            at: byte in it at which the states [R, n + 2, M] begin: a row for each token of each prompt and its
                answer, one prompt after the other. The rows of last tokens are not written.
            dtype: of the states.
            flags: further command-line flags.
            say: takes a remark.
            progress: is called with the number of prompts that were answered since the last call.

        Returns:
            For each prompt the tokens of its answer.
        """


@dataclass(frozen=True)
class Answer:
    """What the target wrote to one prompt, and its states.

    Attributes:
        tokens: [T] ids: the prompt, the answer, and what the target writes after it (as many tokens as a chain has
            steps, because a server's last verify step looks at them).
        states: [T, n + 2, M] of every position; the row of the last token is never read.
        prompt_length: tokens of the prompt.
        completion_tokens: tokens of the answer.
        group: the group of the prompt.
    """

    tokens: Tensor
    states: Tensor
    prompt_length: int
    completion_tokens: int
    group: str | None

    @property
    def rows(self) -> Tensor:
        """Name the feature rows from which a draft proposes tokens of the answer."""
        return torch.arange(self.prompt_length - 1, self.prompt_length + self.completion_tokens - 2)


@dataclass(frozen=True)
class Features:
    """Answers of one target with all their states, which stay in their file.

    Attributes:
        answers: the answers that have a row to draft from.
        num_layers: n.
        steps: how many tokens past each answer are known.
        target: the target, as it was named.
    """

    answers: tuple[Answer, ...]
    num_layers: int
    steps: int
    target: str

    @classmethod
    def open(cls, file: Path) -> Features:
        """Read a feature file; the states are mapped, not loaded.

        The file is a safetensors file: ``states`` [R, n + 2, M] (F32, BF16 or F16: boundaries 0..n, then the state
        after the final norm), ``tokens`` [R], ``starts`` [S + 1] (where each of the S sequences begins, and R),
        ``prompt_lengths`` [S], ``completion_tokens`` [S], all int64; metadata ``schema`` = 1, ``target``, ``steps``
        and ``groups`` (a JSON list, a string or null for each sequence).

        Raises:
            CheckpointError: it cannot be read, or its parts contradict each other; names all of them.
        """
        try:
            with safe_open(file, "pt") as opened:
                metadata = opened.metadata() or {}
                names = ("states", "tokens", "starts", "prompt_lengths", "completion_tokens")
                absent = sorted(set(names) - set(opened.keys())) + sorted({"schema", "steps"} - set(metadata))
                if absent or metadata["schema"] != "1":
                    raise CheckpointError(
                        f"{file}: got {', '.join(absent) + ' missing' if absent else metadata['schema']}; expected a "
                        "feature file of schema 1. Write it with --save-features."
                    )
                states, tokens, starts, prompts, completions = (opened.get_tensor(name) for name in names)
                steps = int(metadata["steps"])
                groups = json.loads(metadata.get("groups", "null")) or [None] * len(prompts)
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(
                f"{file}: cannot be read, got {error}; expected a feature file. Write it with --save-features."
            ) from error
        ends = starts[1:]
        lengths = ends - starts[:-1]
        checks = (
            (states.dim() == 3 and states.shape[1] >= 3, f"states {list(states.shape)}, expected [R, n + 2, M]"),
            (len(tokens) == len(states), f"{len(tokens)} tokens, expected one for each of {len(states)} states"),
            (len(starts) > 0 and int(starts[0]) == 0, "starts that do not begin at 0"),
            (len(starts) > 0 and int(starts[-1]) == len(tokens), "starts that do not end with the tokens"),
            (bool((lengths > 0).all()), "starts that do not ascend"),
            (len(prompts) == len(completions) == len(lengths), "lists of different lengths"),
            (
                isinstance(groups, list)
                and len(groups) == len(lengths)
                and all(group is None or isinstance(group, str) for group in groups),
                "groups that do not name one for each sequence",
            ),
            (steps > 0, f"{steps} steps, expected at least one"),
            (bool((tokens >= 0).all()), "negative token ids"),
        )
        wrong = [text for holds, text in checks if not holds]
        if not wrong and bool(((prompts < 1) | (completions < 1) | (prompts + completions > lengths)).any()):
            wrong.append("prompts and answers that do not fit into their sequences")
        if wrong:
            raise CheckpointError(
                f"{file}: got {'; '.join(wrong)}; expected parts that fit. Write it anew with --save-features."
            )
        answers = [
            Answer(tokens[begin:end].long(), states[begin:end], prompt, completion, group)
            for begin, end, prompt, completion, group in zip(
                starts.tolist(), ends.tolist(), prompts.tolist(), completions.tolist(), groups, strict=False
            )
        ]
        usable = tuple(answer for answer in answers if len(answer.rows))
        return cls(usable, states.shape[1] - 2, steps, metadata.get("target", ""))


class FeatureWriter:
    """Write a feature file answer by answer; it appears under its name when it is complete.

    Args:
        file: the file; it must not exist.
        target: the target, as it was named.
        steps: how many tokens past each answer are going to be written.
    """

    def __init__(self, file: Path, *, target: str, steps: int) -> None:
        if os.path.lexists(file):
            raise CheckpointError(f"{file}: is there already; expected a free name. Choose another one.")
        self._file = file
        self._partial = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
        self._metadata = {"schema": "1", "target": target, "steps": str(steps)}
        self._shape: tuple[int, ...] = ()
        self._dtype = torch.float32
        self._tokens: list[Tensor] = []
        self._lists: dict[str, list[int]] = {"starts": [0], "prompt_lengths": [], "completion_tokens": []}
        self._groups: list[str | None] = []

    def __enter__(self) -> FeatureWriter:
        self._out = open(self._partial, "xb")  # noqa: SIM115
        self._out.seek(STATES_AT)
        return self

    def leave_room(self, rows: int, shape: Sequence[int], dtype: torch.dtype) -> Path:
        """Make the file large enough for states [rows, *shape] that another process writes.

        They begin at ``STATES_AT``; disk is taken when they are written.

        Returns:
            The place where the file lies until it is complete.
        """
        os.truncate(self._partial, STATES_AT + rows * math.prod(shape) * dtype.itemsize)
        return self._partial

    def append(self, answer: Answer) -> None:
        """Write one answer; all must have states of one shape and dtype.

        States on the device ``meta`` stand in the file already, see :meth:`leave_room`.
        """
        states = answer.states.contiguous()
        if self._tokens and (self._shape, self._dtype) != (tuple(states.shape[1:]), states.dtype):
            raise ValueError(
                f"answer: got states {list(states.shape[1:])}; expected {list(self._shape)} as before. Write one "
                "target's."
            )
        self._shape, self._dtype = tuple(states.shape[1:]), states.dtype
        if states.is_meta:
            self._out.seek(states.nbytes, os.SEEK_CUR)
        else:
            self._out.write(states.view(torch.uint8).numpy().data)
        self._tokens.append(answer.tokens)
        self._lists["starts"].append(self._lists["starts"][-1] + len(answer.tokens))
        self._lists["prompt_lengths"].append(answer.prompt_length)
        self._lists["completion_tokens"].append(answer.completion_tokens)
        self._groups.append(answer.group)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._finish()
                os.rename(self._partial, self._file)
        finally:
            self._out.close()
            self._partial.unlink(missing_ok=True)

    def _finish(self) -> None:
        rows = self._lists["starts"][-1]
        name = next(name for name, dtype in _DTYPES.items() if dtype == self._dtype)
        at = self._out.tell() - STATES_AT
        header: dict[str, Any] = {
            "__metadata__": {**self._metadata, "groups": json.dumps(self._groups)},
            "states": {"dtype": name, "shape": [rows, *self._shape], "data_offsets": [0, at]},
        }
        integers = {"tokens": torch.cat(self._tokens)} | {k: torch.tensor(v) for k, v in self._lists.items()}
        for key, values in integers.items():
            self._out.write(values.long().numpy().tobytes())
            header[key] = {"dtype": "I64", "shape": list(values.shape), "data_offsets": [at, at + 8 * len(values)]}
            at += 8 * len(values)
        text = json.dumps(header).encode()
        # The format allows a header to be padded with spaces.
        self._out.seek(0)
        self._out.write((STATES_AT - 8).to_bytes(8, "little") + text.ljust(STATES_AT - 8))
        self._out.flush()


def capture(
    model: Any,
    prompts: Sequence[Sequence[int]],
    groups: Sequence[str | None],
    writer: FeatureWriter,
    *,
    max_new_tokens: int,
    steps: int,
    progress: Callable[[int], object] = lambda tokens: None,
) -> None:
    """Let a target answer prompts greedily and keep every boundary at every position.

    Prompts of like length run together, padded on the left of what is their own; states are kept while the answer is
    written, so that no token is computed twice. Every row goes on past the end of its answer, as a server's
    verification does.

    Args:
        model: a causal language model of transformers.
        prompts: token ids of each prompt.
        groups: the group of each prompt.
        writer: receives the answers.
        max_new_tokens: length of an answer that does not end by itself.
        steps: tokens to write past the end of each answer.
        progress: is called with the number of tokens of answers that are done.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for some in batches(order, prompts, model, max_new_tokens + steps):
        answers = _answer(model, [prompts[i] for i in some], max_new_tokens, steps, progress)
        for i, answer in zip(some, answers, strict=True):
            writer.append(replace(answer, group=groups[i]))


def capture_elsewhere(
    engine: Engine,
    target: TargetFacts,
    prompts: Sequence[Sequence[int]],
    groups: Sequence[str | None],
    writer: FeatureWriter,
    *,
    max_new_tokens: int,
    steps: int,
    dtype: torch.dtype,
    flags: Sequence[str],
    say: Callable[[str], object],
    progress: Callable[[int], object],
) -> None:
    """Do what ``capture`` does by another engine, which writes the states itself.

    Args:
        engine: the engine.
        target: the target; its path is a folder.
        prompts: token ids of each prompt.
        groups: the group of each prompt.
        writer: receives the answers.
        max_new_tokens: length of an answer that does not end by itself.
        steps: tokens to write past the end of each answer.
        dtype: of the states.
        flags: further flags for the engine.
        say: takes remarks.
        progress: is called with the number of prompts that are done.

    Raises:
        CheckpointError: the engine left states out.
    """
    new = max_new_tokens + steps
    shape = (target.num_layers + 2, target.hidden_size)
    file = writer.leave_room(sum(len(prompt) + new for prompt in prompts), shape, dtype)
    written = engine(
        Path(target.path), prompts, new, file, STATES_AT, dtype=dtype, flags=flags, say=say, progress=progress
    )
    eos = _read_eos(target.path)
    # One place of each row is looked at, in the file as it lies on the disk: rows that were not written are zeros.
    size = file.stat().st_size - STATES_AT
    mapped = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)[STATES_AT:]
    states = mapped.view(dtype).view(size // (math.prod(shape) * dtype.itemsize), *shape)
    row = 0
    for prompt, answer, group in zip(prompts, written, groups, strict=True):
        tokens = torch.tensor([*prompt, *answer])
        absent = int((states[row : row + len(tokens) - 1, -1] == 0).all(-1).sum())
        if absent:
            raise CheckpointError(
                f"{target.path}: got no state for {absent} of {len(tokens)} tokens; expected all. Leave out flags that "
                "keep tokens from being computed."
            )
        row += len(tokens)
        ends = torch.isin(tokens[len(prompt) : len(prompt) + max_new_tokens], eos).nonzero()[:, 0].tolist()
        completion = ends[0] + 1 if ends else max_new_tokens
        writer.append(
            Answer(tokens, torch.empty(len(tokens), *shape, dtype=dtype, device="meta"), len(prompt), completion, group)
        )


def row_bytes(model: Any) -> int:
    """Count the bytes of all states of one token of a model of transformers."""
    config = model.config.get_text_config()
    return state_bytes(config.num_hidden_layers, config.hidden_size, model.dtype)


def state_bytes(num_layers: int, width: int, dtype: torch.dtype) -> int:
    """Count the bytes of all states of one token."""
    return (num_layers + 2) * width * dtype.itemsize


def batches(order: Sequence[int], prompts: Sequence[Sequence[int]], model: Any, new: int) -> Iterator[Sequence[int]]:
    """Cut prompts, sorted by length, into batches whose states fit into memory."""
    begin = 0
    while begin < len(order):
        size = 64
        while size > 1:
            longest = len(prompts[order[min(begin + size, len(order)) - 1]]) + new
            if size * longest * row_bytes(model) <= BATCH_BYTES:
                break
            size -= 1
        yield order[begin : begin + size]
        begin += size


def common_start(prompts: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all prompts begin with, such as a chat template's; each keeps one for itself."""
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    return min(sum(1 for _ in same), min(map(len, prompts)) - 1)


@torch.inference_mode()
def _answer(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    steps: int,
    progress: Callable[[int], object],
) -> list[Answer]:
    """Answer one batch. What all its prompts begin with runs once; answers that are complete leave it."""
    config, eos = model.config.get_text_config(), _eos(model.generation_config)
    layers = config.num_hidden_layers
    longest, new = max(map(len, prompts)), max_new_tokens + steps
    before_norm: list[Tensor] = []
    hook = final_norm(model).register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    past: Any = None

    def run(feed: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the token that each row writes, and all states of its new tokens."""
        nonlocal past
        before_norm.clear()
        out = model(
            input_ids=feed,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=1,
        )
        past = out.past_key_values
        # Of transformers' states the last one is that after the final norm; boundary n is the norm's input.
        return out.logits[:, -1].argmax(-1), (*out.hidden_states[:layers], before_norm[0], out.hidden_states[layers])

    try:
        shared = common_start(prompts)
        begun: tuple[Tensor, ...] = ()
        if shared:
            feed = torch.tensor([prompts[0][:shared]], device=model.device)
            _, begun = run(feed, torch.ones_like(feed), torch.arange(shared, device=model.device)[None])
            if _keeps_everything(past, longest + new):
                past.batch_repeat_interleave(len(prompts))
            else:
                past, shared, begun = None, 0, ()
        pads = [longest - len(prompt) for prompt in prompts]
        feed = torch.tensor([[0] * pad + list(prompt[shared:]) for pad, prompt in zip(pads, prompts, strict=True)])
        columns = torch.arange(longest)
        mask = ((columns < shared) | (columns >= shared + torch.tensor(pads)[:, None])).long()
        feed, mask = feed.to(model.device), mask.to(model.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, shared:]
        states = torch.empty(len(prompts), longest + new - 1, layers + 2, config.hidden_size, dtype=model.dtype)
        for place, state in enumerate(begun):
            states[:, :shared, place] = state.to(states.device)
        written = torch.full((len(prompts), new), -1)
        running, at = torch.arange(len(prompts)), shared
        for step in range(new):
            token, every = run(feed, mask, positions)
            here = slice(at, at + feed.shape[1])
            for place, state in enumerate(every):
                states[running, here, place] = state.to(states.device)
            at = here.stop
            written[running, step] = token.to(written.device)
            progress(len(prompts) if step < max_new_tokens else 0)
            going = ~torch.isin(written[running, : max(0, step + 1 - steps)], eos).any(-1)
            if not going.any():
                break
            feed, mask, positions = token[:, None], F.pad(mask, (0, 1), value=1), positions[:, -1:] + 1
            # To leave a batch costs a copy of its cache.
            if going.sum() <= 0.9 * len(running) and _keeps_everything(past, longest + new):
                stay = going.nonzero()[:, 0]
                running, stay = running[stay], stay.to(model.device)
                past.batch_select_indices(stay)
                feed, mask, positions = feed[stay], mask[stay], positions[stay]
        progress(len(prompts) * max(0, max_new_tokens - step - 1))
    finally:
        hook.remove()
    answers = []
    for prompt, pad, row, its in zip(prompts, pads, written, states, strict=True):
        ends = torch.isin(row[:max_new_tokens], eos).nonzero()[:, 0].tolist()
        completion = ends[0] + 1 if ends else max_new_tokens
        tokens = torch.cat([torch.tensor(list(prompt)), row[: completion + steps]])
        rows = its.new_zeros(len(tokens), *its.shape[1:])
        rows[:shared] = its[:shared]
        rows[shared:-1] = its[shared + pad : pad + len(tokens) - 1]
        answers.append(Answer(tokens, rows, len(prompt), completion, None))
    return answers


def _keeps_everything(past: Any, columns: int) -> bool:
    """Say whether a cache holds a key and a value of each of so many columns, and nothing else.

    Then rows of it can be copied and left out, and padding may stand anywhere: a window would count it in.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    def keeps(layer: Any) -> bool:
        kind = type(layer)
        return kind is DynamicLayer or (kind is DynamicSlidingWindowLayer and layer.sliding_window > columns)

    layers = getattr(past, "layers", ())
    return bool(layers) and all(map(keeps, layers))


def _read_eos(target: str | Path) -> Tensor:
    """Read the tokens that end an answer from a folder, as transformers finds them when it loads the model."""
    from transformers import AutoConfig, GenerationConfig

    try:
        return _eos(GenerationConfig.from_pretrained(target))
    except OSError:
        return _eos(AutoConfig.from_pretrained(target).get_text_config())


def _eos(config: Any) -> Tensor:
    """List the tokens that end an answer."""
    eos = getattr(config, "eos_token_id", None)
    return torch.tensor([] if eos is None else [eos] if isinstance(eos, int) else list(eos), dtype=torch.int64)


def load_target(target: str | Path, device: str = "cpu") -> Any:
    """Load a target in transformers: float32 on a CPU, as stored elsewhere.

    Raises:
        CheckpointError: transformers cannot load it.
        UnsupportedError: not every state of it can be caught in transformers.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32 if device == "cpu" else "auto")
        _choose_attention(model, device)
        model = model.to(device).eval()
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise CheckpointError(
            f"{target}: transformers cannot load it on {device}, got {first_line(error)}; expected a causal "
            "language model. Capture its states elsewhere and give them with --features."
        ) from error
    final_norm(model)  # before an hour is spent on writing
    return model


def _choose_attention(model: Any, device: str) -> None:
    """Let a model attend as it was trained to, and on a CPU without a copy of each key for every query head."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if model.config._attn_implementation != "sdpa":
        return
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        # transformers' form of PyTorch's attention knows no such cap, and leaves it out without a word.
        model.set_attn_implementation("eager")
    elif device == "cpu":
        AttentionInterface.register("grouped_sdpa", _attend_in_groups)
        AttentionMaskInterface.register("grouped_sdpa", sdpa_mask)
        model.set_attn_implementation("grouped_sdpa")


def _attend_in_groups(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' ``sdpa``; the one query of each head that shares a key head becomes a row of one call.

    Args:
        module: the attention.
        query: [B, HQ, T, D].
        key: [B, HKV, S, D].
        value: [B, HKV, S, DV].
        attention_mask: [B, 1, T, S], or ``None``.
        options: see transformers.

    Returns:
        [B, T, HQ, DV], and ``None``.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, rows, width = query.shape
    groups = heads // key.shape[1]
    if rows > 1 or groups == 1 or options.get("position_bias") is not None:
        attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return attended
    out = F.scaled_dot_product_attention(
        query.reshape(batch, -1, groups, width),
        key,
        value,
        attn_mask=None if attention_mask is None else attention_mask.expand(batch, 1, groups, -1),
        scale=options.get("scaling"),
    )
    return out.reshape(batch, 1, heads, -1), None
