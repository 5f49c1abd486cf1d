"""Batches as they occur in a real service: `parity --trace FILE`.

Requests come from a trace of lengths, in one of two formats::

    arrival_ms,input_tokens,cached_prefix_tokens,output_tokens               CSV, with this header
    {"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1, 2]}       Mooncake's JSON lines

A hash id stands for a block of 512 prompt tokens; leading blocks that an earlier request had are a prefix hit. Two
servers that are never idle make steps of them by continuous batching: one that also decodes, and one that hands a
request on when its prompt is done. Steps of both are drawn. At their real lengths the geometry of every split is
checked exactly; with lengths divided until they fit, the layer runs (`plan`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsacp_npu.commands.parity_scenarios import Plan
from dsacp_ref.layer import uses_context_parallel
from dsacp_ref.spec import INT32_MAX, check_int, check_number, contract_error

HASH_BLOCK = 512  # prompt tokens a hash id stands for
TOKEN_BUDGET = 8192  # new tokens a step
MAX_RUNNING = 8  # requests at a time
SCALED_TOKENS = 1500  # what the float layer takes, prefixes included

CSV_COLUMNS = ("arrival_ms", "input_tokens", "cached_prefix_tokens", "output_tokens")
JSON_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


class Request(NamedTuple):
    """Lengths of one request: its prompt, the part of it that a prefix cache holds, and what it generates."""

    prompt: int
    cached: int
    output: int


class Share(NamedTuple):
    """What one request gets in one step: its number in the trace, tokens before the step, tokens in it."""

    request: int
    computed: int
    new: int


class DrawnStep(NamedTuple):
    """One step of a server; the name is its kind and the step's number."""

    name: str
    shares: tuple[Share, ...]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """query_start_loc and seq_lens at real lengths."""
        loc = np.cumsum([0, *(share.new for share in self.shares)]).astype(np.int32)
        return loc, np.array([share.computed + share.new for share in self.shares], np.int32)


# --- reading ---


def requests_of(path: str) -> list[Request]:
    """The requests of a trace file in order of arrival; the format is told by the first sign of the file.

    Raises:
        ContractError: naming the line that is malformed.
    """
    with Path(path).open(encoding="utf-8", newline="") as file:
        try:
            lines = file.read().splitlines()
        except UnicodeDecodeError as error:
            raise contract_error("--trace", "be a text file in UTF-8", path, str(error)) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise contract_error("--trace", "hold requests", f"an empty file {path}")
    arrivals = (
        json_requests(path, numbered) if numbered[0][1].lstrip().startswith("{") else csv_requests(path, numbered)
    )
    if not arrivals:
        raise contract_error("--trace", "hold requests", f"only a header in {path}")
    return arrivals


def count_of(path: str, line: int, name: str, value: Any, least: int = 0) -> int:
    """A token count of some line, as an int."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    return check_int(f"{path} line {line}: {name}", value, least, INT32_MAX)


def csv_requests(path: str, lines: list[tuple[int, str]]) -> list[Request]:
    """The requests of a CSV file."""
    (number, header), *rest = lines
    names = [name.strip() for name in next(csv.reader([header]))]
    if sorted(names) != sorted(CSV_COLUMNS):
        rule = f"be the header {','.join(CSV_COLUMNS)}, or a JSON object"
        raise contract_error(f"{path} line {number}", rule, repr(header[:80]))
    requests = []
    for number, line in rest:
        fields = next(csv.reader([line]))
        if len(fields) != len(names):
            raise contract_error(f"{path} line {number}", f"have {len(names)} fields", len(fields))
        row = dict(zip(names, fields, strict=True))
        prompt = count_of(path, number, "input_tokens", row["input_tokens"], 1)
        cached = count_of(path, number, "cached_prefix_tokens", row["cached_prefix_tokens"])
        if cached >= prompt:
            hint = "the last token of a prompt is always computed"
            raise contract_error(f"{path} line {number}: cached_prefix_tokens", f"be below {prompt}", cached, hint)
        arrival = count_of(path, number, "arrival_ms", row["arrival_ms"])
        requests.append(
            (arrival, Request(prompt, cached, count_of(path, number, "output_tokens", row["output_tokens"])))
        )
    return [request for _, request in sorted(requests, key=lambda pair: pair[0])]


def json_requests(path: str, lines: list[tuple[int, str]]) -> list[Request]:
    """The requests of a file of JSON lines."""
    rows: list[tuple[float, int, int, list[int]]] = []
    for number, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise contract_error(f"{path} line {number}", "be a JSON object", repr(line[:80]), str(error)) from None
        missing = [key for key in JSON_KEYS if not isinstance(row, dict) or key not in row]
        if missing:
            raise contract_error(f"{path} line {number}", f"have {', '.join(missing)}", repr(line[:80]))
        ids = row["hash_ids"]
        if not isinstance(ids, list) or not all(type(block) is int for block in ids):
            raise contract_error(f"{path} line {number}: hash_ids", "be a list of ints", repr(ids)[:80])
        arrival = check_number(f"{path} line {number}: timestamp", row["timestamp"], at_least=0)
        prompt = count_of(path, number, "input_length", row["input_length"], 1)
        rows.append((arrival, prompt, count_of(path, number, "output_length", row["output_length"]), ids))
    seen: set[int] = set()
    requests = []
    for _, prompt, output, ids in sorted(rows, key=lambda row: row[0]):
        hits = next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        requests.append(Request(prompt, min(hits, (prompt - 1) // HASH_BLOCK) * HASH_BLOCK, output))
        seen.update(ids)
    return requests


def full_steps(requests: Sequence[Request], budget: int) -> list[DrawnStep]:
    """All prompts but their cached parts, in order of arrival, cut where a step is full; the last one may not be.

    What does not fit goes on in the next step, behind what was computed before.
    """
    steps: list[DrawnStep] = []
    shares: list[Share] = []
    room = budget
    for index, request in enumerate(requests):
        computed = request.cached
        while computed < request.prompt:
            new = min(request.prompt - computed, room)
            shares.append(Share(index, computed, new))
            computed, room = computed + new, room - new
            if room == 0:
                steps.append(DrawnStep(f"full{len(steps)}", tuple(shares)))
                shares, room = [], budget
    return [*steps, DrawnStep(f"full{len(steps)}", tuple(shares))] if shares else steps


# --- the servers ---

SERVERS = ("mixed", "prefill")


def service(requests: Sequence[Request], kind: str) -> Iterator[DrawnStep]:
    """The steps in which a server works on a prompt, numbered among all its steps.

    A request is admitted when there is room, in order of arrival. On a ``"mixed"`` server every running request that
    has its prompt decodes one token a step. What the token budget leaves goes to prompts, in order of admission, cut
    into chunks.
    """
    running: list[list[int]] = []  # request, tokens before the step, prompt tokens left, decode steps left
    waiting = iter(enumerate(requests))
    upcoming = next(waiting, None)
    number = 0
    while running or upcoming:
        room = TOKEN_BUDGET - sum(left == 0 for _, _, left, _ in running)
        while upcoming and len(running) < MAX_RUNNING and room > sum(left for _, _, left, _ in running):
            index, request = upcoming
            decodes = max(request.output - 1, 0) if kind == "mixed" else 0  # the prompt's last token gives the first
            running.append([index, request.cached, request.prompt - request.cached, decodes])
            upcoming = next(waiting, None)
        if all(left == 0 for _, _, left, _ in running):
            # Nothing but decoding until a request ends and makes room.
            jump = min(steps for *_, steps in running)
            number += jump
            for state in running:
                state[1] += jump
                state[3] -= jump
        else:
            shares = []
            for state in running:
                index, computed, left, _ = state
                new = min(left, room) if left else 1
                room -= new if left else 0
                state[1] += new
                state[2 if left else 3] -= new
                if new:
                    shares.append(Share(index, computed, new))
            yield DrawnStep(f"{kind}{number}", tuple(shares))
            number += 1
        running = [state for state in running if state[2] or state[3]]


def drawn_steps(path: str, count: int, seed: int) -> list[DrawnStep]:
    """Some steps that split their tokens over ranks, from all over the trace, both servers in turn."""
    requests = requests_of(path)
    rng = np.random.default_rng(seed)
    drawn = []
    for i, kind in enumerate(SERVERS):
        steps = [step for step in service(requests, kind) if uses_context_parallel(*step.arrays())]
        chosen = rng.permutation(len(steps))[: (count + 1 - i) // len(SERVERS)]
        drawn += [steps[place] for place in sorted(chosen.tolist())]
    return drawn


def named_step(path: str, name: str) -> DrawnStep:
    """The step that a scenario's name stands for."""
    requests = requests_of(path)
    for kind in SERVERS:
        if name.startswith(kind):
            for step in service(requests, kind):
                if step.name == name:
                    return step
    hint = f"a server ({' or '.join(SERVERS)}) and the number of a step that works on a prompt"
    raise contract_error("--cell scenario", f"name a step of {path}", repr(name), hint)


# --- scaled down, for the layer ---


def divisor_of(step: DrawnStep) -> int:
    """The power of two that lengths are divided by, so that the step fits with its prefixes."""
    divisor = 1
    while sum(map(sum, scaled_lengths(step, divisor).values())) > SCALED_TOKENS and divisor < HASH_BLOCK:
        divisor *= 2
    return divisor


def scaled_lengths(step: DrawnStep, divisor: int) -> dict[str, tuple[int, int]]:
    """Tokens before and in the step, by request: nothing vanishes, and what was no decode stays none."""
    lengths = {}
    for request, computed, new in step.shares:
        lengths[f"r{request}"] = -(-computed // divisor), max(-(-new // divisor), min(new, 2))
    return lengths


def plan(step: DrawnStep) -> Plan:
    """Two steps for the layer: what the requests had before, really computed, then the drawn step."""
    lengths = scaled_lengths(step, divisor_of(step))
    before = {name: computed for name, (computed, _) in lengths.items() if computed}
    drawn = {name: new for name, (_, new) in lengths.items()}
    return Plan(name=step.name, steps=(before, drawn) if before else (drawn,))
