"""The changes that mutation testing makes: each is one node of a file, turned into something near it.

    comparison  `<` into `<=` or `>=`, `==` into `!=`, `in` into `not in`, …
    condition   turned round, `and` into `or`, `not` left out
    constant    True into False; a small number into its neighbours; a larger one, a chosen figure, into 0 and into
                a hundred times as much, which a test of its rule notices without knowing the figure; a text into ""
    call        left out: None, or its first argument
    return      the other truth, or None

What is left alone, as a change there breaks no rule: docstrings and every other text with a space in it (it is
for people), f-strings (mostly texts; before Python 3.12 their parts have no position), help texts and metavars,
log lines, annotations, names of types, `__all__` and the like, asserts (they state what cannot be). And what
would break at once, which any test notices: decorators, the calls in `raise` and `with`, `super()`.
"""

import ast
import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

_OPPOSITE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_LOGGERS = {"log", "logger", "logging"}
_FOR_TYPES = {"cast", "NewType", "TypeVar", "ParamSpec", "super", "getLogger"}
_FOR_PEOPLE = {"help", "description", "epilog", "metavar", "prog", "documentation"}
_NAMES_OF_MODULES = {"__all__", "__slots__", "__version__", "__match_args__"}
# Calls that give back what they are given, to whoever runs them.
_SAME = {"tuple", "frozenset", "NodeName", "PodUid", "ModelId", "ModelName", "GpuUuid"}
_SMALL = 2
_ATOMS = (ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.List, ast.Dict, ast.Set)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change. `start` and `end` are byte offsets into the file; `lines` those of the whole statement, to
    find the tests that run it; `before` and `after` the lines that differ, without their indentation."""

    file: str
    function: str
    kind: str
    lines: tuple[int, ...]
    line: int
    start: int
    end: int
    text: str
    before: str
    after: str
    at_import: bool

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a change is known by when the lines around it have moved."""
        return self.file, self.function, self.before, self.after

    @property
    def package(self) -> str:
        return self.file.partition("/")[0]

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def changes_of(root: Path, file: str) -> list[Change]:
    """Every change of a file, in the order of their places."""
    source = (root / file).read_bytes()
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda one: (one.start, one.end, one.kind))


def sample(changes: Iterable[Change], count: int, seed: str) -> list[Change]:
    """As many places of each kind as there are, up to `count` in all, and one change for each place."""
    chance = random.Random(seed)
    kinds: dict[str, list[list[Change]]] = {}
    for (kind, *_), there in groupby(changes, key=lambda one: (one.kind, one.file, one.start, one.end)):
        kinds.setdefault(kind, []).append(list(there))
    for places in kinds.values():
        chance.shuffle(places)
    taken: list[Change] = []
    while len(taken) < count and any(kinds.values()):
        taken += [chance.choice(places.pop()) for _, places in sorted(kinds.items()) if places]
    return sorted(taken[:count], key=lambda one: (one.file, one.start, one.after))


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: bytes) -> None:
        self.found: list[Change] = []
        self._file, self._source = file, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._scope: list[str] = []
        self._in_function = False
        self._says_truth = False
        self._statement: ast.AST = ast.Pass()

    # --- where we are

    def visit(self, node: ast.AST) -> None:
        outside = self._statement
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            self._statement = node
        super().visit(node)
        self._statement = outside

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        outside = self._in_function, self._says_truth
        self._in_function = True
        self._says_truth = isinstance(node.returns, ast.Name) and node.returns.id == "bool"
        self._inside(node.name, node.body)
        self._in_function, self._says_truth = outside

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node.name, node.body)

    def _inside(self, name: str, body: Sequence[ast.stmt]) -> None:
        self._scope.append(name)
        for statement in body:
            self.visit(statement)
        self._scope.pop()

    # --- what is left alone

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Left alone."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Left alone."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(one, ast.Name) and one.id in _NAMES_OF_MODULES for one in node.targets):
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call):
            self.generic_visit(node.exc)

    def visit_withitem(self, node: ast.withitem) -> None:
        self.generic_visit(node.context_expr if isinstance(node.context_expr, ast.Call) else node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in _FOR_PEOPLE:
            self.visit(node.value)

    # --- what is changed

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "__name__ == '__main__'"):
            self._condition(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node)

    def visit_While(self, node: ast.While) -> None:
        self._condition(node)

    def _condition(self, node: ast.If | ast.IfExp | ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr, kind: str = "condition") -> None:
        match test:
            case ast.Constant() | ast.Compare(ops=[_]) if kind == "condition":
                pass  # the comparison or the constant itself is changed
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._change(kind, test, operand)
            case _:
                self._change(kind, test, ast.UnaryOp(ast.Not(), test))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._change("condition", node, ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, operator in enumerate(node.ops):
            for other in _OPPOSITE[type(operator)]:
                changed = copy.copy(node)
                changed.ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                self._change("comparison", node, changed)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        for value in _near(node.value):
            self._change("constant", node, ast.Constant(value))

    def visit_Await(self, node: ast.Await) -> None:
        if isinstance(node.value, ast.Call):
            self._call(node.value, node)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._call(node, node)

    def _call(self, node: ast.Call, whole: ast.expr) -> None:
        """`whole` is the call, or the `await` of it."""
        name = ast.unparse(node.func)
        if name.split(".")[0].lstrip("_") in _LOGGERS or name.split(".")[-1] in _FOR_TYPES:
            return
        self._change("call", whole, ast.Constant(None))
        alone = isinstance(self._statement, ast.Expr) and self._statement.value is whole
        if node.args and not alone and name not in _SAME and not isinstance(node.args[0], ast.Starred):
            self._change("call", whole, node.args[0])
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if value is None:
            return
        truth = self._says_truth or isinstance(value, ast.Compare | ast.BoolOp)
        if truth and not isinstance(value, ast.Constant):
            self._negate(value, "return")
        elif not truth and not (isinstance(value, ast.Constant) and value.value is None):
            self._change("return", value, ast.Constant(None))
        self.visit(value)

    def _change(self, kind: str, node: ast.expr, new: ast.expr) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        height = self._source.count(b"\n", start, end)
        text = ast.unparse(new)
        if height or not (isinstance(new, _ATOMS) or isinstance(node, ast.Compare)):
            text = "(" + text + "\n" * height + ")"  # no line moves
        head, tail = self._starts[node.lineno - 1], self._starts[node.end_lineno]
        self.found.append(
            Change(
                file=self._file,
                function=".".join(self._scope),
                kind=kind,
                lines=self._lines(),
                line=node.lineno,
                start=start,
                end=end,
                text=text,
                before=_one_line(self._source[head:tail]),
                after=_one_line(self._source[head:start] + text.encode() + self._source[end:tail]),
                at_import=not self._in_function,
            )
        )

    def _lines(self) -> tuple[int, ...]:
        """Those of a statement; of one with a body those before the body."""
        statement = self._statement
        first, last = _span(statement.pattern if isinstance(statement, ast.match_case) else statement)
        if isinstance(statement, ast.Match):
            last = statement.cases[0].pattern.lineno - 1
        elif body := getattr(statement, "body", None):
            last = max(first, body[0].lineno - 1)
        return tuple(range(first, last + 1))


def _span(node: ast.AST) -> tuple[int, int]:
    assert isinstance(node, ast.stmt | ast.excepthandler | ast.pattern)
    assert node.end_lineno is not None
    return node.lineno, node.end_lineno


def _near(value: object) -> Iterator[float | str | bytes]:
    match value:
        case bool():
            yield not value
        case int() if abs(value) <= _SMALL:
            yield from (value + 1, value - 1)
        case int() | float():
            yield from (0, value * 100) if value else (1.0,)
        case str() if " " in value:
            return
        case str() | bytes():
            yield type(value)() if value else ("x" if isinstance(value, str) else b"x")


def _one_line(text: bytes) -> str:
    return " ".join(text.decode().split())
