"""Train the demo's draft on what ``generate.py`` stored; stop and start at will.

    python train.py --model .demo/SmolLM2-135M-Instruct --data DATA --out RUN --one-step 2500 --test-time 1200

The first ``--one-step`` updates train the feature pass alone, which is cheap and teaches most; the last
``--test-time`` updates unroll three steps, so the draft learns to go on from its own hidden state. The loss
is the cross-entropy to the target's distribution, recomputed from the stored final states, on generated
positions only, weighted 0.8^k at step k. Each update compares draft and target on a part of the draft's
vocabulary: the tokens of the batch, the most frequent ones and a random share of the others. Both are
normalised over that part, so the optimum stays the same, and the head costs a third. What is kept is an
exponential average of the weights, at the update where its chains of three get the longest accept length on
the validation topics.

Data that ``generate.py`` finishes meanwhile is taken in at the next epoch. ``RUN`` receives
``checkpoint.pt`` (to resume), ``log.json`` (the curve) and ``draft/`` (the best average so far).
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import os
import pathlib
import random
import time
from typing import Any

import torch
from draft import Draft, Keys
from evaluate import Chains, acceptable, verify
from generate import Sequence, read
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

STEPS = 3
STEP_WEIGHT = 0.8


def count(sequences: list[Sequence]) -> collections.Counter[int]:
    """Count the generated tokens of sequences."""
    counts: collections.Counter[int] = collections.Counter()
    for s in sequences:
        counts.update(s.ids[s.prompt_length :].tolist())
    return counts


@torch.no_grad()
def choose_vocabulary(
    sequences: list[Sequence], embedding: Tensor, size: int, sample: int = 16384
) -> tuple[list[int], list[int], float]:
    """Choose the target's tokens that the draft can propose: what was generated first, then what might have been.

    Counts of generated tokens say nothing about words of topics that no prompt named. The probability that the target
    gave to a token without choosing it does, and covers new topics better than the lowest ids of the vocabulary.

    Args:
        sequences: training sequences; their generated parts are counted.
        embedding: the target's embedding, which is its head, too [V, H].
        size: number of tokens to choose.
        sample: positions, evenly spread, at which the target's distribution is computed.

    Returns:
        The ids, ascending; the same ids, most frequent first; the share of generated tokens they cover.
    """
    counts = count(sequences)
    total = sum(counts.values())
    step = max(1, total // sample)
    probability, first = torch.zeros(len(embedding)), 0
    for s in sequences:
        states = s.final[s.prompt_length - 1 + first : len(s.ids) - 1 : step]
        first = (first - (len(s.ids) - s.prompt_length)) % step
        probability += (states.float() @ embedding.T).softmax(-1).sum(0)
    chosen = dict.fromkeys(token for token, _ in counts.most_common(size))
    for token in probability.argsort(descending=True).tolist():
        if len(chosen) == size:
            break
        chosen.setdefault(token)
    return sorted(chosen), list(chosen), sum(counts[t] for t in chosen) / total


def keep_vocabulary(sequences: list[Sequence], directory: pathlib.Path) -> tuple[list[int], list[int], float]:
    """Take over the tokens that a draft can propose: rows that it has not trained would outbid the others.

    Args:
        sequences: training sequences; their generated parts are counted.
        directory: folder of the draft.

    Returns:
        What ``choose_vocabulary`` returns.
    """
    offsets = load_file(directory / "model.safetensors")["d2t"]
    ids = (offsets + torch.arange(len(offsets))).tolist()
    counts = count(sequences)
    return ids, sorted(ids, key=lambda token: -counts[token]), sum(counts[t] for t in ids) / sum(counts.values())


def batches(sequences: list[Sequence], size: int, rng: random.Random) -> list[list[int]]:
    """Cut one epoch into batches of similar lengths, in random order.

    Args:
        sequences: what to cut.
        size: sequences in a batch; a smaller last one is dropped.
        rng: source of the order.

    Returns:
        Indices into ``sequences``.
    """
    order = sorted(
        range(len(sequences)),
        key=lambda i: (sequences[i].prompt_length // 32, len(sequences[i].ids) + 30 * rng.random()),
    )
    cut = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
    rng.shuffle(cut)
    return cut


def losses(
    draft: Draft,
    embedding: Tensor,
    part: Tensor,
    batch: list[Sequence],
    steps: int,
    state_weight: float,
    temperature: float,
    bfloat16: bool,
) -> list[tuple[Tensor, float]]:
    """Return the loss and the agreement of each step on a batch.

    Row p reads the features of position p and the embedding of token p + 1; at step k it predicts what the
    target answered at position p + 1 + k. Every step therefore predicts the same answers, from rows that
    lie one further back each time.

    Args:
        draft: the draft.
        embedding: the target's embedding [V, H].
        part: rows of the draft's head to compare on, ascending.
        batch: sequences.
        steps: steps to unroll.
        state_weight: weight of the distance between draft state and target state.
        temperature: at which the target's distribution is to be met; below 1 its choice counts for more.
        bfloat16: whether to multiply matrices in bfloat16; weights, residual stream and losses are float32 either way.

    Returns:
        For each step the mean loss, and the share of predictions equal to the target's choice, both within
        ``part``.
    """
    longest = max(len(s.ids) for s in batch)
    rows = longest - 1
    ids = torch.zeros(len(batch), longest + steps, dtype=torch.long)
    features = torch.zeros(len(batch), rows, batch[0].features.shape[1])
    where, answers = [], []
    for i, s in enumerate(batch):
        length = len(s.ids)
        ids[i, :length] = s.ids
        features[i, : length - 1] = s.features[: length - 1].float()
        where.append(
            torch.stack([torch.full((length - s.prompt_length,), i), torch.arange(s.prompt_length - 1, length - 1)])
        )
        answers.append(s.final[s.prompt_length - 1 : length - 1])
    sequence, position = torch.cat(where, 1)
    start = max(0, int(position.min()) - steps)
    with torch.no_grad():
        # The target's head is its embedding.
        states = torch.cat(answers).float()
        wanted = states @ embedding[draft.target_ids[part]].T
        choice = wanted.argmax(-1)
        wanted = (wanted / temperature).softmax(-1)
    head = draft.lm_head.weight[part]
    past: Keys = []
    made = []
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        hidden = draft.fc(F.dropout(features, draft.midlayer.mlp.dropout)).float()
    for k in range(steps):
        first = 0 if k == 0 else start
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            hidden = draft.layer(F.embedding(ids[:, 1 + k + first : 1 + k + rows], embedding), hidden, past, start)
            normed = draft.norm(hidden[sequence, position - 1 - k - start])
            logits = F.linear(normed, head)
        logits = logits.float()
        agreement = (logits.detach().argmax(-1) == choice).float().mean()
        loss = F.cross_entropy(logits, wanted)
        if state_weight:
            loss = loss + state_weight * F.smooth_l1_loss(normed, states)
        made.append((loss, float(agreement)))
    return made


def validate(draft: Draft, embedding: Tensor, sequences: list[Sequence]) -> Chains:
    """Verify chains on sequences held out of training.

    Args:
        draft: the draft.
        embedding: the target's embedding.
        sequences: held-out sequences.

    Returns:
        The totals.
    """
    return verify(
        (acceptable(draft, embedding, s.ids, s.features, s.prompt_length), len(s.ids) - s.prompt_length)
        for s in sequences
    )


class Run:
    """Hold everything that a training run changes, and write it to disk."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Set up a run, or take up the one whose checkpoint lies in ``arguments.out``.

        Args:
            arguments: the command line.
        """
        self.arguments = arguments
        self.out: pathlib.Path = arguments.out
        self.out.mkdir(parents=True, exist_ok=True)
        config = json.loads((arguments.model / "config.json").read_text())
        saved: dict[str, Any] | None = None
        if (self.out / "checkpoint.pt").exists():
            saved = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.epoch, self.index = (0, 0) if saved is None else (saved["epoch"], saved["index"])
        self.files: list[str] = self._finished() if saved is None else saved["files"]
        self.sequences = read([arguments.data / name for name in self.files])
        self.held_out = read([arguments.data / "validation-00000.safetensors"])[: arguments.validate_on]
        weights = load_file(arguments.model / "model.safetensors")
        self.embedding = weights["model.embed_tokens.weight"].float()
        if saved is None:
            if arguments.vocabulary is None:
                ids, by_frequency, coverage = keep_vocabulary(self.sequences, arguments.init)
            else:
                ids, by_frequency, coverage = choose_vocabulary(self.sequences, self.embedding, arguments.vocabulary)
            kept = set(ids)
            held_out = [t for s in self.held_out for t in s.ids[s.prompt_length :].tolist()]
            self.log: dict[str, Any] = {
                "settings": {k: v for k, v in vars(arguments).items() if not isinstance(v, pathlib.Path)},
                "coverage": round(coverage, 4),
                "coverage_validation": round(sum(t in kept for t in held_out) / len(held_out), 4),
                "epochs": [self._volume()],
                "curve": [],
                "validation": [],
            }
        else:
            ids, by_frequency = saved["ids"], saved["by_frequency"]
            self.log = json.loads((self.out / "log.json").read_text())
        self.by_frequency = by_frequency
        self.row_of = torch.full((config["vocab_size"],), -1).index_copy_(0, torch.tensor(ids), torch.arange(len(ids)))
        self.frequent = self.row_of[torch.tensor(by_frequency[: arguments.frequent])]
        self.rare = self.row_of[torch.tensor(by_frequency[arguments.frequent :])]
        self.draft = Draft(config, ids)
        with torch.no_grad():
            self.draft.lm_head.weight.copy_(self.embedding[self.draft.target_ids])
            self.draft.norm.weight.copy_(weights["model.norm.weight"].float())
        if arguments.init is not None:
            self.draft.load(arguments.init)
        self.average = copy.deepcopy(self.draft).requires_grad_(False).eval()
        self.draft.midlayer.mlp.dropout = arguments.dropout
        head = [self.draft.lm_head.weight]
        layer = [p for p in self.draft.parameters() if p is not head[0]]
        self.optimizer = torch.optim.AdamW(
            [{"params": layer, "scale": 1.0}, {"params": head, "scale": arguments.head_rate}],
            lr=0.0,
            betas=(0.9, 0.95),
            weight_decay=0.01,
        )
        self.draft.lm_head.weight.requires_grad_(arguments.head_rate > 0)
        self.update, self.seconds, self.best = 0, 0.0, 0.0
        if saved is not None:
            self.draft.load_state_dict(saved["draft"])
            self.average.load_state_dict(saved["average"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.update, self.seconds, self.best = saved["update"], saved["seconds"], saved["best"]

    def _finished(self) -> list[str]:
        kinds = ("questions", "forms", "sampled", "kept")
        return sorted(p.name for kind in kinds for p in self.arguments.data.glob(f"{kind}-*.safetensors"))

    def _volume(self) -> dict[str, int]:
        generated = sum(len(s.ids) - s.prompt_length for s in self.sequences)
        return {"files": len(self.files), "sequences": len(self.sequences), "generated_tokens": generated}

    def _part(self, batch: list[Sequence], rng: random.Random) -> Tensor:
        rows = self.row_of[torch.cat([s.ids[s.prompt_length :] for s in batch])]
        generator = torch.Generator().manual_seed(rng.getrandbits(31))
        others = self.rare[torch.randperm(len(self.rare), generator=generator)[: self.arguments.others]]
        return torch.cat([rows[rows >= 0], self.frequent, others]).unique()

    def save(self) -> None:
        """Write checkpoint and log, each complete or not at all."""
        state = {
            "files": self.files,
            "epoch": self.epoch,
            "index": self.index,
            "ids": self.draft.target_ids.tolist(),
            "by_frequency": self.by_frequency,
            "draft": self.draft.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "update": self.update,
            "seconds": self.seconds,
            "best": self.best,
        }
        torch.save(state, self.out / "checkpoint.unfinished")
        os.replace(self.out / "checkpoint.unfinished", self.out / "checkpoint.pt")
        (self.out / "log.json").write_text(json.dumps(self.log, indent=1) + "\n")

    def validate(self) -> None:
        """Measure the averaged weights and keep them when they are the best so far."""
        chains = validate(self.average, self.embedding, self.held_out)
        entry = {
            "update": self.update,
            "seconds": round(self.seconds),
            "accept_length": round(chains.accept_length, 4),
            "conditional_acceptance": [round(c, 4) for c in chains.conditional],
        }
        self.log["validation"].append(entry)
        tqdm.write(json.dumps(entry))
        if chains.accept_length > self.best:
            self.best = chains.accept_length
            self.average.save(self.out / "draft")

    def train(self) -> None:
        """Train to the last update."""
        a = self.arguments
        last = a.one_step + a.test_time
        order = batches(self.sequences, a.batch, random.Random(a.seed * 1000 + self.epoch))
        recent: list[list[tuple[float, float]]] = []
        if self.update == 0:
            self.validate()
        with tqdm(total=last, initial=self.update, unit="update", mininterval=5) as bar:
            while self.update < last:
                began = time.monotonic()
                if self.index == len(order):
                    self.epoch, self.index, self.files = self.epoch + 1, 0, self._finished()
                    self.sequences = read([a.data / name for name in self.files])
                    order = batches(self.sequences, a.batch, random.Random(a.seed * 1000 + self.epoch))
                    self.log["epochs"].append({"update": self.update, **self._volume()})
                rate = a.lr * min(1.0, (self.update + 1) / a.warmup) * (1.0 - self.update / last)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate * group["scale"]
                steps = 1 if self.update < a.one_step else STEPS
                batch = [self.sequences[i] for i in order[self.index]]
                self.index += 1
                part = self._part(batch, random.Random(a.seed * 1_000_000 + self.update))
                made = losses(
                    self.draft, self.embedding, part, batch, steps, a.state_weight, a.target_temperature, a.bfloat16
                )
                loss = sum((STEP_WEIGHT**k * value for k, (value, _) in enumerate(made)), torch.zeros(()))
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
                self.optimizer.step()
                self.update += 1
                decay = min(a.average, (1 + self.update) / (10 + self.update))
                for kept, now in zip(self.average.parameters(), self.draft.parameters(), strict=True):
                    kept.lerp_(now.detach(), 1.0 - decay)
                self.seconds += time.monotonic() - began
                recent.append([(float(value.detach()), agreement) for value, agreement in made])
                bar.update()
                if self.update % a.log_every == 0 or self.update in (a.one_step, last):
                    recent = [r for r in recent if len(r) == steps]
                    columns = list(zip(*recent, strict=True))
                    entry = {
                        "update": self.update,
                        "seconds": round(self.seconds),
                        "lr": round(rate, 7),
                        "loss": [round(sum(c[0] for c in column) / len(recent), 4) for column in columns],
                        "agreement": [round(sum(c[1] for c in column) / len(recent), 4) for column in columns],
                    }
                    self.log["curve"].append(entry)
                    bar.set_postfix_str(f"loss {entry['loss']} agreement {entry['agreement']}")
                    recent = []
                if self.update % a.validate_every == 0 or self.update == last:
                    self.validate()
                    self.save()


def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="folder of the dequantised target")
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder written by generate.py")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of this run")
    parser.add_argument("--init", type=pathlib.Path, help="folder of a draft to start from")
    parser.add_argument(
        "--vocabulary", type=int, help="rows of the draft's head (default: those of --init, else 13312)"
    )
    parser.add_argument("--one-step", type=int, required=True, help="updates of the first phase")
    parser.add_argument("--test-time", type=int, required=True, help="updates of the second phase")
    parser.add_argument("--frequent", type=int, default=2048, help="most frequent tokens, part of every update")
    parser.add_argument("--others", type=int, default=1536, help="random other tokens of an update")
    parser.add_argument("--batch", type=int, default=8, help="sequences per update")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate, decays linearly to 0")
    parser.add_argument(
        "--head-rate", type=float, default=0.1, help="learning rate of the head, times that of the rest"
    )
    parser.add_argument("--state-weight", type=float, default=0.0, help="weight of the distance to the target's state")
    parser.add_argument(
        "--target-temperature",
        type=float,
        default=1.0,
        help="at which the target's distribution is met; below 1 its choice counts for more",
    )
    parser.add_argument("--bfloat16", action="store_true", help="multiply matrices in bfloat16")
    parser.add_argument("--dropout", type=float, default=0.1, help="of the target's states and inside the MLP")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--average", type=float, default=0.99, help="decay of the average of the weights")
    parser.add_argument("--validate-on", type=int, default=60, help="validation sequences used")
    parser.add_argument("--validate-every", type=int, default=200)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.target_temperature <= 0:
        parser.error(f"--target-temperature: got {arguments.target_temperature}; expected more than 0. Give 1.")
    if arguments.init is None and arguments.vocabulary is None:
        arguments.vocabulary = 13312
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    Run(arguments).train()


if __name__ == "__main__":
    main()
