"""The only description of the rule format: ``rules/rule.schema.json`` is generated from these models.

What a key means is told in ``docs/reference/rule-format.md``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, StrictFloat, StrictInt, StrictStr, Tag

ValueName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
DimName = Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$")]
OpType = Annotated[str, Field(pattern=r"^[A-Z]\w*$")]
DTypeName = Literal[
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int4",
    "uint4",
    "bool",
    "float8e4m3fn",
    "float8e5m2",
]
TypeVariable = Literal["T", "U", "V"]
Number = StrictBool | StrictInt | StrictFloat
#: A value (`x`, `x?`), capture (`$x`), `_`, `absent`, `...`, a number, or a list of numbers.
Operand = (
    Number
    | Annotated[StrictStr, Field(pattern=r"^([a-z][a-z0-9_]*\??|\$[a-z][a-z0-9_]*|_|absent|\.\.\.)$")]
    | list[Number]
)
#: In a rewrite: a value (`x`, `x*`), capture, `absent`, a number, or a list of integers and dims (`N`, `N*`).
NewOperand = (
    Number
    | Annotated[StrictStr, Field(pattern=r"^([a-z][a-z0-9_]*\*?|\$[a-z][a-z0-9_]*|absent)$")]
    | list[Number | Annotated[StrictStr, Field(pattern=r"^[A-Z][A-Za-z0-9]*\*?$")]]
)
Reference = Annotated[StrictStr, Field(pattern=r"^(\$?[a-z][a-z0-9_]*|[A-Z][A-Za-z0-9]*)\*?$")]
Condition = Annotated[str, Field(pattern=r"^((>=|<=|==|<|>)?\d+)(,(>=|<=|==|<|>)\d+)*$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Predicates(Strict):
    """Allowed on every value, input or interior."""

    dtype: DTypeName | TypeVariable | list[DTypeName] | None = None
    rank: Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^((>=|<=|==|<|>)\d+|\d+\.\.\d+)$")] | None = None
    shape: list[StrictInt | Literal["...", "1...", "_"] | DimName] | None = None
    same_shape: ValueName | None = None
    broadcastable: ValueName | None = None


class Input(Predicates):
    const: bool | None = None


class OpNode(Predicates):
    op: OpType
    domain: str = ""
    in_: list[Operand] = Field(alias="in")
    attrs: dict[str, Any] = {}
    out: list[ValueName | Literal["_"]] | None = None
    optional: bool = False
    ordered: bool = False
    set: dict[ValueName, Any] = {}


class Chain(Predicates):
    chain: Literal["Add", "Mul"]
    of: Annotated[list[Operand], Field(min_length=2, max_length=6)]
    set: dict[ValueName, Any] = {}


class Same(Predicates):
    is_: ValueName = Field(alias="is")
    set: dict[ValueName, Any] = {}


def _kind(value: Any) -> str:
    keys = value if isinstance(value, dict) else {f.rstrip("_") for f in value.model_fields_set}
    return next((key for key in ("any_of", "chain", "is") if key in keys), "op")


Leaf = Annotated[
    Annotated[OpNode, Tag("op")] | Annotated[Chain, Tag("chain")] | Annotated[Same, Tag("is")], Discriminator(_kind)
]


class AnyOf(Predicates):
    any_of: Annotated[list[Leaf], Field(min_length=1)]


Node = Annotated[
    Annotated[OpNode, Tag("op")]
    | Annotated[Chain, Tag("chain")]
    | Annotated[Same, Tag("is")]
    | Annotated[AnyOf, Tag("any_of")],
    Discriminator(_kind),
]


class Target(Strict):
    T: list[DTypeName] | None = None
    sm: Condition | None = None


class DimRule(Strict):
    multiple_of: Annotated[int, Field(ge=1)] | None = None
    min: int | None = None
    max: int | None = None


class CaptureRule(Strict):
    range: tuple[float, float] | None = None
    one_of: list[Any] | None = None


class Where(Strict):
    fn: ValueName
    of: list[Number | Reference] = []
    with_: dict[ValueName, Any] = Field({}, alias="with")
    set: dict[ValueName, ValueName] = {}


class Siblings(Strict):
    share: Annotated[list[Reference], Field(min_length=1)]
    min: Annotated[int, Field(ge=2)] = 2
    max: Annotated[int, Field(ge=2)] = 64


class WeightFn(Strict):
    fn: ValueName
    of: list[Reference] = []
    axis: int | Reference | None = None
    perm: list[int] | None = None
    shape: list[StrictInt | DimName] | None = None
    parts: int | list[StrictInt | DimName] | None = None
    part: int | Reference | None = None
    block: int | Reference | None = None
    value: float | Reference | None = None
    before: int | DimName | None = None
    after: int | DimName | None = None
    layout: Literal["NK", "KN"] | Annotated[str, Field(pattern=r"^\$[a-z][a-z0-9_]*$")] | None = None
    to: DTypeName | TypeVariable | None = None
    missing: DimName | None = None
    if_: Annotated[str, Field(pattern=r"^\$[a-z][a-z0-9_]*$")] | None = Field(None, alias="if")


class NewOp(Strict):
    op: OpType
    domain: str = ""
    in_: list[NewOperand] = Field(alias="in")
    attrs: dict[str, Any] = {}
    out: list[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*\*?$")]]


class Extend(Strict):
    extend: ValueName
    inputs: dict[ValueName, NewOperand] = {}
    attrs: dict[str, Any] = {}
    out: list[ValueName]


def _new_kind(value: Any) -> str:
    keys = value if isinstance(value, dict) else value.model_fields_set
    return "extend" if "extend" in keys else "op"


NewNode = Annotated[Annotated[NewOp, Tag("op")] | Annotated[Extend, Tag("extend")], Discriminator(_new_kind)]


class Rewrite(Strict):
    weights: dict[ValueName, WeightFn] = {}
    node: NewNode | None = None
    nodes: list[NewNode] = []
    alias: dict[ValueName, ValueName] = {}


class Rule(Strict):
    """A rule without its tests."""

    schema_: Literal[1] = Field(alias="schema")
    id: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    stage: Literal["lift", "fuse", "lower"]
    summary: Annotated[str, Field(max_length=140)]
    priority: int | None = None
    opset: Condition | None = None
    targets: dict[Literal["cuda", "cpu"], Target] | None = None
    inputs: dict[ValueName, Input] = {}
    captures: dict[ValueName, CaptureRule] = {}
    dims: dict[DimName, DimRule] = {}
    nodes: Annotated[dict[ValueName, Node], Field(min_length=1)]
    outputs: Annotated[list[ValueName], Field(min_length=1)]
    shared: dict[ValueName, list[OpType] | Literal["any"]] = {}
    where: list[Where] = []
    siblings: Siblings | None = None
    rewrite: Rewrite


class Expect(Strict):
    op: OpType | None = None
    domain: str | None = None
    count: int = 1
    attrs: dict[str, Any] = {}
    nodes: int | None = None
    ops: dict[str, int] = {}


class MatchCase(Strict):
    name: str
    graph: str | None = None
    from_: str | None = Field(None, alias="from")
    replace: dict[str, str] = {}
    as_: DTypeName | None = Field(None, alias="as")
    opset: int | None = None
    target: str = "cpu"
    expect: Expect = Expect()
    numeric: bool = True
    because: str | None = None
    canonicalize: bool = True
    sizes: dict[str, int] = {}


class NoMatchCase(Strict):
    from_: str = Field(alias="from")
    because: str
    replace: dict[str, str] = {}
    as_: DTypeName | None = Field(None, alias="as")
    opset: int | None = None
    target: str | None = None
    canonicalize: bool | None = None
    count: int = 0


class Tests(Strict):
    match: Annotated[list[MatchCase], Field(min_length=1)]
    no_match: list[NoMatchCase] = []


class RuleFile(Rule):
    """A whole rule file; the JSON schema is made from this one."""

    tests: Tests
