"""The tool of gsm8k-turns.sh: arithmetic, without running what the model wrote as Python."""

import ast
import operator

from verl.tools.function_tool import function_tool

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
LONGEST = 200
"""Characters of an expression."""


@function_tool
def calculate(expression: str) -> str:
    """Compute an arithmetic expression, such as 12 * (3 + 4) / 7.

    Args:
        expression: Numbers, + - * / and parentheses.
    """
    try:
        if len(expression) > LONGEST:
            raise ValueError(f"longer than {LONGEST} characters")
        return f"{value_of(ast.parse(expression, mode='eval').body):g}"
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError) as error:
        return f"error: {error}"


def value_of(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.operand))
    raise ValueError("only numbers, + - * / and parentheses")
