"""Restrictions on parameters as text, such as "block_x * block_y <= 1024": arithmetic and comparisons, nothing else."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelwright.errors import UsageError

Columns = Mapping[str, npt.NDArray[Any]]
"""The values of each parameter, one for each configuration; a constant parameter may be a single value."""


def _unless_by_zero(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Not a number where the divisor is 0; numpy's whole numbers would give 0."""
    return lambda left, right: np.where(np.equal(right, 0), np.nan, operation(left, right))


_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _unless_by_zero(operator.truediv),
    ast.FloorDiv: _unless_by_zero(operator.floordiv),
    ast.Mod: _unless_by_zero(operator.mod),
    ast.Pow: operator.pow,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: np.logical_not,
}
_CALLS: Mapping[str, Callable[..., Any]] = {"min": np.minimum, "max": np.maximum, "abs": np.abs}


class Restriction:
    """One rule over parameters. UsageError when the text is not an expression of the kind allowed."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise UsageError(f"a restriction must be a Python expression over parameters, got {text!r}") from error

    def holds(self, columns: Columns) -> npt.NDArray[np.bool_]:
        """Whether each configuration keeps the rule; one where it divides by zero does not."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self._value(self._tree, columns), dtype=np.bool_)

    def terms(self, columns: Columns) -> dict[str, npt.NDArray[np.float64]]:
        """The quantities of two parameters or more that the rule speaks of, by their text.

        What must divide something is given as the quotient. Who wrote the rule tells by it which products matter.
        """
        found: dict[str, npt.NDArray[np.float64]] = {}
        with np.errstate(divide="ignore", invalid="ignore"):
            for node in ast.walk(self._tree):
                names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
                varied = [name for name in names if name in columns and np.size(columns[name]) > 1]
                if isinstance(node, ast.BinOp) and len(varied) > 1:
                    quotient = ast.BinOp(node.left, ast.Div(), node.right) if isinstance(node.op, ast.Mod) else node
                    found[ast.unparse(quotient)] = np.asarray(self._value(quotient, columns), dtype=np.float64)
        return found

    def _value(self, node: ast.expr, columns: Columns) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return value
            case ast.Name(id=name) if name in columns:
                return columns[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](self._value(left, columns), self._value(right, columns))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return _UNARY[type(op)](self._value(operand, columns))
            case ast.BoolOp(op=op, values=values):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return join.reduce(np.broadcast_arrays(*(self._value(value, columns) for value in values)))
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self._comparison(left, ops, others, columns)
            case ast.Call(func=ast.Name(id=name), args=[first, *rest], keywords=[]) if name in _CALLS:
                return _CALLS[name](self._value(first, columns), *(self._value(value, columns) for value in rest))
        raise UsageError(
            f"a restriction may use parameters ({', '.join(columns)}), numbers, arithmetic and comparisons, "
            f"got {ast.unparse(node)!r} in {self.text!r}"
        )

    def _comparison(self, left: ast.expr, ops: list[ast.cmpop], others: list[ast.expr], columns: Columns) -> Any:
        result: Any = True
        value = self._value(left, columns)
        for op, other in zip(ops, others, strict=True):
            if isinstance(op, ast.In | ast.NotIn) and isinstance(other, ast.List | ast.Tuple):
                listed = np.isin(value, [self._value(item, columns) for item in other.elts])
                result = np.logical_and(result, listed if isinstance(op, ast.In) else ~listed)
                continue
            if type(op) not in _COMPARE:
                raise UsageError(f"a restriction may compare with ==, !=, <, <=, > and >=, got {self.text!r}")
            following = self._value(other, columns)
            result = np.logical_and(result, _COMPARE[type(op)](value, following))
            value = following
        return result
