"""The ways to share a layer among ranks, and why some cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dsacp_npu.planning.models import LayerKind, Model
from dsacp_ref.config import check_combination
from dsacp_ref.spec import UnsupportedError, check_int

__all__ = ["ENGINES", "SPLITS", "Refused", "Scheme", "engine_of", "named_schemes", "schemes_of", "tensor_parallel"]

# Rules of the definition as planning tries them; pages of 128 keep every window of a compressor whole.
SPLITS = (
    "contiguous",
    "contiguous_request",
    "zigzag",
    "zigzag_ceil",
    "zigzag_padded",
    "round_robin",
    "round_robin_page(128)",
)
ROWS_AND_KEYS = (
    ("full", "replicate"),
    ("full", "gather_kv"),
    ("full", "gather_compressed"),
    ("scattered", "gather_hidden"),
    ("scattered", "gather_kv"),
    ("scattered", "gather_compressed"),
)
OUTPUT_MODES = ("all_to_all", "gather_weight", "replicated_weight")


class Scheme(NamedTuple):
    """One way to run a model's layers on ranks: ``cp_size`` groups of ``tp_size``.

    Fields:
        cp_size: int, ranks that split the tokens.
        tp_size: int, ranks that split the heads of each share of tokens; a scheme with cp_size 1 is plain TP.
        split, rows, key_mode, output_mode: str, as `dsacp_ref.layer_over_ranks`.
    """

    cp_size: int
    tp_size: int
    split: str
    rows: str
    key_mode: str
    output_mode: str

    @property
    def topology(self) -> str:
        """The groups in words: ``tp8``, ``cp8`` or ``cp4 x tp2``."""
        if self.cp_size == 1:
            return f"tp{self.tp_size}"
        return f"cp{self.cp_size}" + f" x tp{self.tp_size}" * (self.tp_size > 1)

    @property
    def modes(self) -> str:
        """The rest in words; plain TP has no more to say."""
        return "-" if self.cp_size == 1 else f"{self.split}, {self.rows}, {self.key_mode}, {self.output_mode}"


class Refused(NamedTuple):
    """A scheme that cannot work, and why."""

    scheme: Scheme
    reason: str


def tensor_parallel(num_ranks: int) -> Scheme:
    """Every rank has all tokens and its share of the heads."""
    return Scheme(1, num_ranks, "contiguous", "full", "replicate", "replicated_weight")


def schemes_of(model: Model, num_ranks: int) -> tuple[list[Scheme], list[Refused]]:
    """All ways to run a model on so many ranks.

    Args:
        model: Model.
        num_ranks: int >= 1.

    Returns:
        list of Scheme that work for every layer, plain TP first; list of Refused.

    Raises:
        ContractError: no ranks.

    >>> from dsacp_npu.planning.models import model_of
    >>> schemes, refused = schemes_of(model_of("v4-flash"), 2)
    >>> schemes[0].topology, len(schemes), refused[0].reason.split(";")[0][:50]
    ('tp2', 121, "split must be 'round_robin_page(n)' with n a multi")
    """
    num_ranks = check_int("ranks", num_ranks, 1)
    found, refused = [], []
    for scheme in candidates(model, num_ranks):
        reason = next(filter(None, (why_not(scheme, kind) for kind in model.kinds)), None)
        if reason is None:
            found.append(scheme)
        else:
            refused.append(Refused(scheme, reason))
    return found, refused


def candidates(model: Model, num_ranks: int) -> Iterator[Scheme]:
    """All combinations of words and sizes; V3.2's layers have one way for keys and one for outputs."""
    yield tensor_parallel(num_ranks)
    latent = any(kind.is_latent for kind in model.kinds)
    sides = (("scattered", "gather_kv"),) if latent else ROWS_AND_KEYS
    outputs = ("replicated_weight",) if latent else OUTPUT_MODES
    for cp_size in range(num_ranks, 1, -1):
        if num_ranks % cp_size == 0:
            for split in SPLITS:
                for rows, key_mode in sides:
                    for output_mode in outputs:
                        yield Scheme(cp_size, num_ranks // cp_size, split, rows, key_mode, output_mode)


def why_not(scheme: Scheme, kind: LayerKind) -> str | None:
    """Why a layer cannot run so; None if it can."""
    tp_size = scheme.tp_size
    if kind.heads % tp_size or kind.groups % tp_size:
        return f"tp_size must divide heads {kind.heads} and o_groups {kind.groups}, got {tp_size}"
    try:
        check_combination(
            split=scheme.split,
            rows=scheme.rows,
            key_mode=scheme.key_mode,
            output_mode=scheme.output_mode,
            compress_ratio=kind.compress_ratio,
            cp_size=scheme.cp_size,
            num_heads=kind.heads // tp_size,
            o_groups=kind.groups // tp_size,
        )
    except UnsupportedError as error:
        return str(error)
    return None


# Who does what, in the words of this house (`docs/design.md` 4). Where an engine has more than one way, the one that
# it takes for long prefills; xLLM #1997 is vllm-ascend's way of decoding, too.
ENGINES = {
    "xLLM #1997": ("contiguous", "full", "replicate", "all_to_all"),
    "vllm-ascend DSA-CP": ("contiguous", "full", "replicate", "gather_weight"),
    "xLLM #2097": ("contiguous_request", "scattered", "gather_hidden", "replicated_weight"),
    "SGLang in-seq-split": ("zigzag", "scattered", "gather_kv", "replicated_weight"),
    "SGLang round-robin-split": ("round_robin", "scattered", "gather_kv", "replicated_weight"),
}
GATHERED_ENTRIES = tuple(
    (split, "scattered", "gather_compressed", output_mode)
    for split, output_mode in (
        ("contiguous", "replicated_weight"),
        *(("zigzag", output_mode) for output_mode in OUTPUT_MODES),
        ("round_robin_page(128)", "replicated_weight"),
    )
)


def engine_of(scheme: Scheme) -> str:
    """The engine that runs a scheme with all ranks splitting tokens; "" for none that we know."""
    if scheme.cp_size == 1:
        return "plain TP"
    modes = (scheme.split, scheme.rows, scheme.key_mode, scheme.output_mode)
    return next((name for name, way in ENGINES.items() if way == modes and scheme.tp_size == 1), "")


def named_schemes(model: Model, num_ranks: int) -> list[Scheme]:
    """A few schemes to compare a trace by: plain TP, the engines' ways, and gathered entries.

    Args:
        model: Model.
        num_ranks: int >= 1.

    Returns:
        list of Scheme: those that work for the model; half of the ranks splitting tokens and pairs of them heads, too.

    >>> from dsacp_npu.planning.models import model_of
    >>> [engine_of(scheme) for scheme in named_schemes(model_of("v3.2"), 8)][:3]
    ['plain TP', 'SGLang in-seq-split', 'SGLang round-robin-split']
    """
    found = [tensor_parallel(num_ranks)]
    if num_ranks > 1:
        found += [Scheme(num_ranks, 1, *way) for way in (*ENGINES.values(), *GATHERED_ENTRIES)]
    if num_ranks > 3 and num_ranks % 2 == 0:
        found += [Scheme(num_ranks // 2, 2, *way) for way in GATHERED_ENTRIES[1:4]]
    legal = set(schemes_of(model, num_ranks)[0])
    return [scheme for scheme in found if scheme in legal]
