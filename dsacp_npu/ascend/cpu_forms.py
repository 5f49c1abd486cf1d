"""Text that MLIR can execute on a CPU, in place of what only the Ascend compiler knows.

Two kinds of operation need it: those that the adapter and HFusion hand to a library (running sums, sort, gather, flip),
and HFusion operations whose region is a placeholder that computes something else. The operations that may stand as they
are were checked one by one; any other is refused by name, so that nothing is executed on trust.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from dsacp_ref.spec import UnsupportedError

__all__ = ["cpu_form"]

# HFusion operations whose region computes what they are called.
STRUCTURED = frozenset({"arange", "bitcast", "cast", "compare", "elemwise_binary", "elemwise_unary", "select"})
COMPARISONS = frozenset({"veq", "vne", "vlt", "vle", "vgt", "vge"})  # the unsigned ones compare signed in the region
UNARY = frozenset({"absi", "cos", "erf", "exp2", "expm1", "rec", "relu", "rsqrt", "sin", "sqrt", "tanh", "log2"})
BINARY = frozenset({"maxnumf", "minnumf", "mod", "powf", "shli", "shrsi", "shrui", "vand", "vor", "vxor"})
ROUNDING = {"rint": "roundeven", "round": "round", "floor": "floor", "ceil": "ceil", "trunc": "trunc"}

OPERATION = re.compile(r"^\s*(?:%[\w:, %#]+ = )?hfusion\.(\w+)", re.M)
LIBRARY = re.compile(r"^ *func\.func private @(\w+)\(.*\n", re.M)
# Calls of the library after the adapter: `%5 = call @triton_cumsum_0(%4, %c0_i32, %false) : (...) -> tensor<8xf32>`.
CALL = re.compile(
    r"(%\w+) = (?:func\.)?call @triton_(cumsum|sort|flip|gather)\w*\((.*?)\) : \((.*?)\) -> (tensor<\S+>)"
)
# The same after HFusion.
CUMSUM = re.compile(r"hfusion\.cumsum (%\S+) : (\S+) cum_dims = \[(\d+)\] reverse = (\w+) -> \S+")
SORT = re.compile(r"hfusion\.sort ins\((%\S+) : (\S+)\) descending = (\w+) sort_axis = (\d+) -> \S+")
FLIP = re.compile(r"hfusion\.flip (%\S+) : (\S+) flip_axis = (\d+) -> \S+")
GATHER = re.compile(r"hfusion\.gather \{.*?\} ins\((%\S+), (%\S+) : (\S+), (\S+)\) outs\(.*?\) axis = (\d+) -> (\S+)")
DEINTERLEAVE = re.compile(r"(%\S+) = hfusion\.deinterleave (%\S+) channel<(\d)> : (\S+) -> (\S+)")
INTERLEAVE = re.compile(r"(%\S+) = hfusion\.interleave (%\S+), (%\S+) : (\S+), \S+ -> (\S+)")
NOT = re.compile(r"(%\S+) = hfusion\.elemwise_unary \{fun = #hfusion\.unary_fn<vnot>\} ins\((%\S+) : (\S+)\) outs\(.*")
EXTREME = re.compile(r"hfusion\.elemwise_binary \{fun = #hfusion\.binary_fn<(max|min)f>\}")
CAST = re.compile(
    r"(%\S+) = hfusion\.cast \{(?P<how>[^}]*)round_mode = #hfusion\.round_mode<(?P<mode>\w+)>[^}]*\} "
    r"ins\((?P<source>%\S+) : (?P<from>tensor\S+)\) outs\((?P<out>%\S+) : (?P<to>\S+)\) -> \S+"
)


class Tensor(NamedTuple):
    """A tensor's type: `tensor<4x8xf32>`."""

    sizes: tuple[int, ...]
    element: str

    @classmethod
    def read(cls, text: str) -> Tensor:
        """From its text."""
        *sizes, element = text.removeprefix("tensor<").removesuffix(">").split("x")
        if not all(size.isdigit() for size in sizes):
            raise UnsupportedError(f"{text}: only static sizes have a CPU form")
        return cls(tuple(map(int, sizes)), element)

    @property
    def text(self) -> str:
        """As text."""
        return f"tensor<{'x'.join([*map(str, self.sizes), self.element])}>"

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating point numbers."""
        return self.element in ("f64", "f32", "f16", "bf16")

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return int(re.sub(r"\D", "", self.element))


def cpu_form(text: str) -> str:
    """The module as a CPU can execute it; UnsupportedError names the first operation that has no such form."""
    library: dict[str, str] = {}
    text = CALL.sub(lambda found: called(found, library), text)
    text = CUMSUM.sub(lambda m: call(library, "cumsum", [m[1]], [m[2]], m[2], int(m[3]), m[4] == "true"), text)
    text = SORT.sub(lambda m: call(library, "sort", [m[1]], [m[2]], m[2], int(m[4]), m[3] == "true"), text)
    text = FLIP.sub(lambda m: call(library, "flip", [m[1]], [m[2]], m[2], int(m[3]), False), text)
    text = GATHER.sub(lambda m: call(library, "gather", [m[1], m[2]], [m[3], m[4]], m[6], int(m[5]), False), text)
    text = DEINTERLEAVE.sub(every_second, text)
    text = INTERLEAVE.sub(interleaved, text)
    text = NOT.sub(inverted, text)
    # Plain maximum passes NaN on: the compiler adds selects where that is not wanted. The region says otherwise.
    text = EXTREME.sub(r"linalg.elemwise_binary {fun = #linalg.binary_fn<\1_signed>}", text)
    text = CAST.sub(rounded, text)
    text = LIBRARY.sub(lambda found: "" if f"@{found[1]}(" not in text.replace(found[0], "") else found[0], text)
    check(text)
    return text.rstrip().removesuffix("}") + "\n".join(library.values()) + "\n}\n"


def check(text: str) -> None:
    """Refuse what would not be executed as it is on the device."""
    for operation in OPERATION.findall(text):
        if operation not in STRUCTURED:
            raise UnsupportedError(f"hfusion.{operation} has no CPU form")
    for kind, checked in (("unary", UNARY), ("binary", BINARY), ("compare", COMPARISONS)):
        for function in re.findall(rf"#hfusion\.{kind}_fn<(\w+)>", text):
            if function not in checked:
                raise UnsupportedError(f"hfusion {kind} function {function} has no CPU form")
    for name in LIBRARY.findall(text):
        raise UnsupportedError(f"library function {name} has no CPU form")


def every_second(found: re.Match[str]) -> str:
    """One channel of pairs along the last axis."""
    result, source, channel, whole, part = found.groups()
    return f"{result} = tensor.extract_slice {source}{window(Tensor.read(part), int(channel))} : {whole} to {part}"


def interleaved(found: re.Match[str]) -> str:
    """Pairs along the last axis, from two channels."""
    result, first, second, part, whole = found.groups()
    half, name = Tensor.read(part), result.removeprefix("%")
    return (
        f"%empty_{name} = tensor.empty() : {whole}\n"
        f"%half_{name} = tensor.insert_slice {first} into %empty_{name}{window(half, 0)} : {part} into {whole}\n"
        f"{result} = tensor.insert_slice {second} into %half_{name}{window(half, 1)} : {part} into {whole}"
    )


def window(part: Tensor, channel: int) -> str:
    """Offsets, sizes and strides of one channel of pairs."""
    last = len(part.sizes) - 1
    offsets, strides = [0] * last + [channel], [1] * last + [2]
    return f"{offsets} {list(part.sizes)} {strides}"


def inverted(found: re.Match[str]) -> str:
    """The complement: the region of `vnot` hands its input on."""
    result, source, kind = found.groups()
    ones = "true" if Tensor.read(kind).element == "i1" else "-1"
    name = f"%ones_{result.removeprefix('%')}"
    return f"{name} = arith.constant dense<{ones}> : {kind}\n{result} = arith.xori {source}, {name} : {kind}"


def rounded(found: re.Match[str]) -> str:
    """A cast that rounds as it says: regions truncate to integers, and leave floats as they are."""
    source, target, mode = Tensor.read(found["from"]), Tensor.read(found["to"]), found["mode"]
    if "bitcast" in found["how"]:
        raise UnsupportedError("hfusion.cast as bitcast has no CPU form")
    if source.is_float and target == source:
        return f"{found[1]} = math.{ROUNDING[mode]} {found['source']} : {source.text}"
    if source.is_float and target.is_float and target.bits < source.bits and mode != "rint":
        raise UnsupportedError(f"hfusion.cast to {target.element} rounding by {mode} has no CPU form")
    if not source.is_float or target.is_float or mode.startswith("trunc"):
        # The verifier knows this mode of casts between integers only; the region does not depend on it.
        return found[0].replace("round_mode<truncwithoverflow>", "round_mode<trunc>")
    name = f"%whole_{found[1].removeprefix('%')}"
    rounding = f"{name} = math.{ROUNDING[mode]} {found['source']} : {source.text}\n"
    return rounding + found[0].replace(f"ins({found['source']} ", f"ins({name} ").replace(f"<{mode}>", "<trunc>")


def called(found: re.Match[str], library: dict[str, str]) -> str:
    """A call of the adapter's library, with what is constant among its arguments read from their names."""
    result, what, names, kinds, kind = found.groups()
    values = [name.strip() for name in names.split(",")]
    tensors = [k.strip() for k in kinds.split(",") if k.strip().startswith("tensor")]
    constants = [re.fullmatch(r"%(?:c(\d+)_i\d+|(true|false))(?:_\d+)?", value) for value in values[len(tensors) :]]
    if None in constants:
        raise UnsupportedError(f"library function triton_{what} along an axis known only at run time has no CPU form")
    axis = next((int(c[1]) for c in constants if c and c[1]), 0)
    flag = any(c[2] == "true" for c in constants if c)
    return f"{result} = {call(library, what, values[: len(tensors)], tensors, kind, axis, flag)}"


def call(
    library: dict[str, str], what: str, values: list[str], kinds: list[str], result: str, axis: int, flag: bool
) -> str:
    """A call of a function of ours, which is added to the library."""
    name = re.sub(r"\W+", "_", f"cpu_{what}_{axis}_{int(flag)}_{'_'.join(kinds)}").strip("_")
    if name not in library:
        arguments = ", ".join(f"%{letter}: {kind}" for letter, kind in zip("ab", kinds, strict=False))
        body = BODIES[what](Tensor.read(result), [Tensor.read(kind) for kind in kinds], axis, flag)
        library[name] = f"func.func @{name}({arguments}) -> {result} {{\n{body}\nreturn %result : {result}\n}}"
    return f"func.call @{name}({', '.join(values)}) : ({', '.join(kinds)}) -> {result}"


def generated(result: Tensor, body: str, value: str) -> str:
    """A tensor made element by element; the body finds its place in %i0, %i1 and so on."""
    places = ", ".join(f"%i{n}: index" for n in range(len(result.sizes)))
    block = f"^bb0({places}):\n" if places else ""
    return f"%result = tensor.generate {{\n{block}{body}\ntensor.yield {value} : {result.element}\n}} : {result.text}"


def at(result: Tensor, axis: int, place: str) -> str:
    """The place of the element, with another index along one axis."""
    return ", ".join(place if n == axis else f"%i{n}" for n in range(len(result.sizes)))


def cumsum(result: Tensor, sources: list[Tensor], axis: int, backwards: bool) -> str:
    """Running sums: each element adds up those before it anew, in order."""
    add, zero = ("arith.addf", "0.0") if result.is_float else ("arith.addi", "0")
    last = result.sizes[axis] - 1
    count = f"arith.subi %last, %i{axis} : index" if backwards else f"arith.addi %i{axis}, %zero : index"
    place = "%place = arith.subi %last, %j : index" if backwards else "%place = arith.addi %j, %zero : index"
    body = f"""%before = {count}
        %stop = arith.addi %before, %one : index
        %sum = scf.for %j = %zero to %stop step %one iter_args(%so_far = %nothing) -> ({result.element}) {{
        {place}
        %x = tensor.extract %a[{at(result, axis, "%place")}] : {sources[0].text}
        %next = {add} %so_far, %x : {result.element}
        scf.yield %next : {result.element}
        }}"""
    return f"""%zero = arith.constant 0 : index
        %one = arith.constant 1 : index
        %last = arith.constant {last} : index
        %nothing = arith.constant {zero} : {result.element}
        {generated(result, body, "%sum")}"""


def flip(result: Tensor, sources: list[Tensor], axis: int, _: bool) -> str:
    """Back to front along an axis."""
    body = f"""%last = arith.constant {result.sizes[axis] - 1} : index
        %place = arith.subi %last, %i{axis} : index
        %x = tensor.extract %a[{at(result, axis, "%place")}] : {sources[0].text}"""
    return generated(result, body, "%x")


def gather(result: Tensor, sources: list[Tensor], axis: int, _: bool) -> str:
    """Elements by their index along an axis; an index outside reads outside, as on the device."""
    body = f"""%index = tensor.extract %b[{at(result, -1, "")}] : {sources[1].text}
        %place = arith.index_cast %index : {sources[1].element} to index
        %x = tensor.extract %a[{at(result, axis, "%place")}] : {sources[0].text}"""
    return generated(result, body, "%x")


def sort(result: Tensor, sources: list[Tensor], axis: int, descending: bool) -> str:
    """Sorted along the last axis: element k is the one with k elements in front of it. Without NaN."""
    if axis != len(result.sizes) - 1:
        raise UnsupportedError("a sort along another axis than the last has no CPU form")
    larger, equal = ("arith.cmpf ogt", "arith.cmpf oeq") if result.is_float else ("arith.cmpi sgt", "arith.cmpi eq")
    first, second = ("%other", "%x") if descending else ("%x", "%other")
    count = result.sizes[axis]
    rank = f"""%x = tensor.extract %a[{at(result, axis, "%j")}] : {result.text}
        %rank = scf.for %k = %zero to %count step %one iter_args(%n = %zero) -> (index) {{
        %other = tensor.extract %a[{at(result, axis, "%k")}] : {result.text}
        %in_front = {larger}, {first}, {second} : {result.element}
        %tie = {equal}, %x, %other : {result.element}
        %earlier = arith.cmpi ult, %k, %j : index
        %tie_in_front = arith.andi %tie, %earlier : i1
        %counts = arith.ori %in_front, %tie_in_front : i1
        %more = arith.select %counts, %one, %zero : index
        %next = arith.addi %n, %more : index
        scf.yield %next : index
        }}
        %placed = tensor.insert %x into %t{axis}[{at(result, axis, "%rank")}] : {result.text}"""
    loops = f"""%r{axis} = scf.for %j = %zero to %count step %one iter_args(%t{axis} = %t) -> ({result.text}) {{
        {rank}
        scf.yield %placed : {result.text}
        }}"""
    for n in reversed(range(axis)):
        inner = re.sub(r"= %t\)", f"= %t{n})", loops)
        loops = f"""%size{n} = arith.constant {result.sizes[n]} : index
            %r{n} = scf.for %i{n} = %zero to %size{n} step %one iter_args(%t{n} = %t) -> ({result.text}) {{
            {inner}
            scf.yield %r{n + 1} : {result.text}
            }}"""
    return f"""%zero = arith.constant 0 : index
        %one = arith.constant 1 : index
        %count = arith.constant {count} : index
        %t = tensor.empty() : {result.text}
        {loops.replace("%r0 =", "%result =", 1)}"""


BODIES: dict[str, Callable[[Tensor, list[Tensor], int, bool], str]] = {
    "cumsum": cumsum,
    "flip": flip,
    "gather": gather,
    "sort": sort,
}
